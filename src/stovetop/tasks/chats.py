"""Public data sets of chats, by name. `sample:no_robots`, which the package ships, has rows of the same form: a few,
for tests and demonstrations."""

from typing import NamedTuple

from stovetop.datasets import Split, load_chats, published, split_rows
from stovetop.renderers.messages import Message

PlacedChat = tuple[int, list[Message]]  # a chat, and its index in its source


class PublishedChats(NamedTuple):
    """Where a data set lies on the Hugging Face hub."""

    source: str
    train_split: str
    test_split: str


CHATS = {
    # Instructions and answers written by people.
    "no_robots": PublishedChats("HuggingFaceH4/no_robots", "train", "test"),
}


def load_split(dataset: str, test_dataset: str | None, test_size: int, seed: int) -> Split[PlacedChat]:
    """The chats to train on, in a first order of their own, and those held out: those of `test_dataset`, or of the test
    split that a published data set has, or `test_size` of the chats."""
    named = published(dataset, CHATS)
    if named is None:
        chats = list(enumerate(load_chats(dataset)))
    else:
        chats = list(enumerate(load_chats(named.source, split=named.train_split)))
    if named is None and test_dataset is None:
        return split_rows(chats, test_size, seed)
    if test_dataset is not None:
        test = load_chats(test_dataset)
    else:
        assert named is not None
        test = load_chats(named.source, split=named.test_split)
    return split_rows(chats, 0, seed)._replace(test=list(enumerate(test)))
