"""Which language a text is in: the texts, and long prompts that say how it is to be answered. The published set of
texts is a file of sentences in fifteen languages, one a line, which the published cookbook has as
`example_data/multilingual.txt`. `sample:multilingual`, which the package ships, has some in five of them.

In a prompt, {text} is where the text goes. `rules` asks for "Final Answer: xx", with a label of two letters; `examples`
has one example of each language, answered by its name, which is what a small model understands.
"""

from collections.abc import Mapping

from stovetop.datasets import Row, load_chats
from stovetop.distillation.prompted import Prompt, check_prompt
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.named_data import LeftOut, Loaded, Source, load_data
from stovetop.renderers.messages import Message
from stovetop.row_sources import digest_of, path_of
from stovetop.rules import shown

ANSWER_PATTERN = r"Final Answer: (\w+)"  # of `rules`; its group is the label

RULES = """\
You say in which language a text is written. Answer with one of these labels: ar (Arabic), de (German), el (Greek), \
en (English), es (Spanish), fr (French), hi (Hindi), ru (Russian), tr (Turkish), ur (Urdu), vi (Vietnamese), \
zh (Chinese), ot (any other language, or none that can be told).

What to look at first:
- Leave out numbers, punctuation, emojis, URLs, e-mail addresses, file paths, tags and names of people.
- Of program code only comments and strings count. A text that is nothing but code, or has no letters left, is ot.

Then the script:
- Devanagari is hi. Greek letters are el. Cyrillic letters are ru. Chinese characters are zh, simplified or not.
- Arabic letters are ur where letters occur that only Urdu has (ے, ڑ, ں, ٹ, ڈ, ہ), or Urdu words; else ar.
- Where several scripts occur, the one with most letters counts.

Then, of Latin letters, the words and the marks on letters:
- vi: marks on most words, and đ, ơ, ư, ă.       - tr: ı, ğ, ş, and words such as ve, bir, için, değil.
- de: ä, ö, ü, ß, and und, der, die, nicht.       - es: ñ, ¿, ¡, and el, los, por, para, pero.
- fr: é, è, ê, ç, œ, and le, les, des, est, avec. - en: the, and, is, of, to, with; without such words it is not en.

When it is hard to tell:
- One word of a language, a brand or a name of a place is no evidence; two function words are.
- A text with as much of one language as of another is ot. So is one in another script than its language is written in.
- A text of one or two words is ot, unless the words occur in one language only, such as "bonjour" or "hola".
- When in doubt: ot.

Answer with exactly one line, "Final Answer: xx", where xx is the label, and with nothing else.

The text:
{text}
"""

EXAMPLES = (
    ("La tienda está cerrada los domingos, pero la panadería está abierta.", "Spanish"),
    ("Магазин закрыт по воскресеньям, но пекарня работает.", "Russian"),
    ("The shop is closed on Sundays, but the bakery is open.", "English"),
    ("Le magasin est fermé le dimanche, mais la boulangerie est ouverte.", "French"),
    ("Das Geschäft ist sonntags geschlossen, aber die Bäckerei ist offen.", "German"),
)  # of six orders the one in which SmolLM2-135M makes the fewest mistakes

PROMPTS: dict[str, Prompt] = {
    "rules": [Message(role="user", content=RULES)],
    "examples": [
        Message(role="system", content="Say in which language the text is: English, German, French, Spanish, Russian."),
        *(
            message
            for text, answer in EXAMPLES
            for message in (Message(role="user", content=text), Message(role="assistant", content=answer))
        ),
        Message(role="user", content="{text}"),
    ],
}


def load_prompt(name: str) -> list[Message]:
    """The one of this name, or that of a file: FILE.txt, what the user says, or FILE.jsonl, a chat."""
    if name in PROMPTS:
        return list(PROMPTS[name])
    if name.endswith(".txt"):
        return list(check_prompt([Message(role="user", content=_read(name))]))
    if name.endswith(".jsonl"):
        chats = load_chats(name)
        if len(chats) != 1:
            raise InvalidRequest(f"the file of a prompt has one chat, and this one has {len(chats)}: {name!r}")
        return list(check_prompt(chats[0]))
    raise UnknownName("prompt", name, PROMPTS, hint="Or pass FILE.txt or FILE.jsonl, in which {text} is the text")


def sources_of_prompt(name: str) -> list[Source]:
    """The file that a prompt is in, if it is in one, for the record of a run."""
    return [] if name in PROMPTS else [Source("prompt", name, num_rows=1, digest=digest_of(name))]


def load_texts(dataset: str, seed: int = 0, revisions: Mapping[str, str] | None = None) -> Loaded[str]:
    """The texts that a config names, in an order of their own; see `named_data.load_data`. A file is FILE.txt, a text a
    line, or has rows with `text`."""
    return load_data(dataset, text_of_row, seed=seed, revisions=revisions)


def text_of_row(row: Row, place: str) -> str | LeftOut:
    """`text`, without the space around it."""
    text = row.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{place} needs 'text'; it is {shown(text)}, and the row has {sorted(row)}")
    return text.strip() or LeftOut("its text is empty")


def _read(name: str) -> str:
    try:
        return path_of(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"this file is not text in UTF-8 ({error}): {name!r}") from error
    except OSError as error:
        raise InvalidRequest(f"this file cannot be read ({error.strerror}): {name!r}") from error
