"""A server that speaks the Tinker protocol over one service in this process, and loses nothing that it acknowledged.

supervisor     the parent, which holds the port and starts it again      ports      what it holds
serve          from start to stop: the folder, the models                app        HTTP: routes, keys, limits, errors
keys           who may use it                                            limits     how much each owner may have
connections    what begins a request in time                             display    what a server shows while it runs
protocol       what each request of training and sampling does           uploads    bodies, read within limits
rest           lists and what is done with checkpoints                   downloads  links to files that need no key
bodies, codec  JSON and protobuf to values; wire: the messages           verbs      what a model's program is made of
program        one model: call, put, acknowledge; replay                 programs   all of them
live           one model in memory                                       ours       what the protocol has no word for
snapshots      where a model's replay begins                             recovery   from the journal to all of this
sessions, requests, checkpoints   other things that clients name
samplers       all sampling sessions; sampler: one; samples: what is drawn
activity       what was done, and the log of it                         overview   what there is at this moment
page           `/`, which shows both                                    metrics    `/metrics`, likewise
completions    samples that have ended, for one question about all      sweeping   what is forgotten in time
journal, rows  what is kept, and how
openai/        the same models for clients of the OpenAI protocol

A request goes from app through protocol to a program or a sampler, whose client does the work; its result comes back
through requests. Nothing here computes.
"""
