"""Our own code inside sandboxes: files that are sent there as text, and need nothing but the standard library. `runner`
shares a process with an untrusted program, so what it says is trusted as little; `judge` has a sandbox without one.
"""
