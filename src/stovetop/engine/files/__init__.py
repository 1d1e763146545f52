"""Adapters on the disk, in PEFT's format (`adapter_files.py`), and models with an adapter merged in (`merge.py`).

Of the other folders they import `lora/`.
"""
