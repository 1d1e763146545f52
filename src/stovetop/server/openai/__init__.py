"""The same models for clients of the OpenAI protocol: `/v1/models`, `/v1/chat/completions`, `/v1/completions`.

routes     the paths, and what errors look like      bodies     what may be asked
models     what a model's name stands for            prompts    chats and texts to tokens, and tools
drawing    answers, drawn whole or in pieces         logprobs   of tokens, and the most probable ones besides
answers    answers as JSON                           streaming  answers as events, while they are drawn
kept       the exact tokens of every answer, under its id

Nothing here trains, and nothing that is drawn is journalled before it is there: a client whose answer was cut off by a
restart asks again.
"""
