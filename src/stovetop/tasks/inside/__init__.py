"""What runs inside a sandbox beside programs that nobody has read: files that are sent there as text, with nothing but
the standard library. What they say is as little to be trusted as the program that they share a process with.
"""
