"""What a server is put through, and what must come of it: nothing that it acknowledged is lost, doubled or changed.

    servers     servers in processes of their own, which are killed and started again
    tenants     clients over the official SDK, and all that they see and leave behind; equal in every run of one seed
    wire        a client that speaks the protocol itself, and knows what it was answered
    disk_calls  calls of the operating system that fail, or are written down

    kills       kill -9 of a server and of its parent, while requests are unanswered
    proxy       requests that are lost, doubled, overtaken or late
    failing     the k-th write, sync or rename fails; the disk is full
    flips       bits that are others than were written
    power       what a disk may have when the power goes
    outages     a server that is away, suspended, without files, or whose clock jumps

Each of the latter has functions that do one part, of a seed, and return what they counted as a JSON object, in which
`faults` lists what must not be. `../promise.py` does many of them, the tests a few.
"""
