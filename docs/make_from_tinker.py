"""Writes docs/from_tinker.md: what differs for those who come from the Tinker SDK and its cookbook, and why.

    python docs/make_from_tinker.py

The tables are those of `sdk_differences.py`, by which clients refuse. A test fails when the page is not what this
writes.
"""

from collections.abc import Iterator
from pathlib import Path

from stovetop.sdk_differences import METHODS, NAMES, PARAMETERS, PARAMETERS_LEFT_OUT

PAGE = Path(__file__).parent / "from_tinker.md"

INTRODUCTION = """\
# Coming from Tinker

Change one import, and a program written for the Tinker SDK trains on your own machine:

```python
import stovetop as tinker
```

A program that you would rather not touch, or one whose imports are in a package, runs as it is:

    python -m stovetop.as_tinker -m tinker_cookbook.recipes.sl_loop model_name=... log_path=...

The same from Python is `import stovetop.as_tinker`, before anything that imports `tinker`. Our tests run the published
tinker-cookbook 0.6.1 this way: supervised learning, RL (synchronous, streaming, asynchronous), DPO and on-policy
distillation, and its two flat loops; each is killed on the way and goes on from its checkpoint. Names, parameters and
defaults are compared with the SDK 0.38.0; all that differs is on this page.

## What behaves otherwise

- **A path is a folder.** `save_state` returns an absolute path where Tinker returns `tinker://...`. Checkpoints are
  saved under `ServiceClient(storage=...)`, by default `~/.stovetop`. `create_rest_client()` lists and deletes them.
- **Nothing is deleted by itself.** `ttl_seconds` is kept with the checkpoint and shown as `expires_at`.
- **`ServiceClient(base_url)` takes the address first**; pass `user_metadata` by name. Without an address the models run
  in this process, and `api_key` is not read. `project_id` and `display_name` are labels that go into every checkpoint.
- **A model is a folder, or a name that the hub knows.** `get_tokenizer()` loads what lies beside its weights.
  `ServiceClient(models={name: folder})` gives names of your own. Creators return at once and the model loads meanwhile;
  `model_id=`, which the SDK does not have, names a training client, as in a program that goes on after a restart.
- **A service ends**: after `close()`, or behind its `with` block, every call of it and of its clients is a
  `ServiceClosed`. One that is not closed ends with the last of its clients.
- **Bad input is refused by the call**, not by its future: with an InvalidRequest, which is a `BadRequestError` and a
  `ValueError`. A missing checkpoint is a `NotFoundError`, one that exists a `ConflictError`. What fails later is a
  `RequestFailedError` with a `category`; it has no `request_id`.
- **The loss `stable_reinforce` is refused**: it has no public definition, so nothing open could be faithful to it. It
  is the default of the cookbook's `rl_loop` and of its `AsyncConfig`: pass `loss_fn="importance_sampling"`, `"ppo"` or
  `"cispo"`. Provenance spans are accepted on any `Datum`, and no loss reads them.
- **Adapters have alpha 32**, as at Tinker; one that PEFT has made keeps its own.
- **Values are frozen dataclasses**, where the SDK has pydantic models. `model_dump()` is there; for `model_copy`,
  `model_dump_json` and `model_validate` use `dataclasses.replace`, `json.dumps(value.model_dump())` and the class.
  Fields may be given by position too. `ModelInput.chunks` and a chunk's `tokens` are tuples: write `[*tokens, 5]`.
  `append_int` adds to the last chunk instead of starting one. A `TensorData` is one numpy array, `.array`, and its
  `.data` a list made of it.
- **No value is changed without a word.** The SDK makes 16 of `"16"`, 16.0 and True, and drops a field that it does not
  know; here the first are an InvalidRequest and the last is a TypeError, as of any Python call. Numbers of numpy and
  torch are numbers, and whole-number weights become floats.
- **Clients and futures are not pickled**, sampling clients neither: a client works in the process that made it. What
  `save_weights_and_get_sampling_client` froze in memory, `SamplingClient.save(folder)`, a method of ours, writes for
  others to sample from.
- **Of the SDK's modules** `stovetop.as_tinker` has `tinker`, `tinker.types` with a module for each of its names, the
  clients' own under `tinker.lib.public_interfaces`, and the errors. `tinker.lib.retry_handler` and the other inner ones
  are not there.
- **The `..._async` methods work** and warn of nothing. New code does not need them: every call returns a future.
- **A seed is kept**: the same seed gives the same samples, whatever else runs beside them.

## What the cookbook here does otherwise

`stovetop.rl`, `stovetop.supervised` and the rest follow the names and defaults of tinker-cookbook. If you have code for
that, run it as it is (above), or mind these when you move it:

- **`ProblemEnv` is not derived from.** Write a problem, an object with `get_question`, `check_answer`, `check_format`
  and `get_reference_answer`, and pass it: a grader is then tested, pickled and shared without an environment.
- **`Env.step` gets the action with its logprobs** (`TokensWithLogprobs`), not its tokens alone: take `action.tokens`.
- **A comparison builder has one method**, `get_labeled_comparisons`, instead of two that take a dataset apart. For rows
  of your own, `ComparisonDatasetBuilderFromRows` takes the function that makes a comparison of one.
- **The last batch of an epoch is trained though it is short.** The cookbook drops it: `drop_last=True`.
- **Configs are dataclasses** where the cookbook has chz. Their fields have its names; where ours differ, the command
  line takes the cookbook's too and says which field it is: `env` (dataset), `batch_size` (groups_per_batch, where
  answers are rewarded), `base_model`, `rl_group_size`, `behavior_if_log_dir_exists`. What is not here, such as
  `wandb_project`, is refused with what to do instead.
- **A parsed answer says how it ended** with a `ParseTermination` that refuses to be a truth value: ask `.is_clean` or
  `.is_stop_sequence`.
- **`get_lr` knows no rate for Qwen3.5, 3.6 and Nemotron**: none is published, so give one.
"""

PARAMETERS_TEXT = """
## Parameters that have no effect here

They are accepted with a value that asks for nothing, and refused with any other.

| parameter | accepted | why |
|---|---|---|
"""

METHODS_TEXT = """
## Methods that are not offered

They exist and refuse, with the reason. So do their `..._async` names.

| method | why |
|---|---|
"""

NAMES_TEXT = """
## Names that are not here

Under `stovetop.as_tinker` they can be imported, so that a module that mentions one loads; using one is refused.

| why | names of `tinker` and `tinker.types` |
|---|---|
"""

LEFT_OUT_TEXT = """
## Parameters that are not here

| parameter | why |
|---|---|
"""


def page() -> str:
    return "".join(
        [
            INTRODUCTION,
            PARAMETERS_TEXT,
            *_parameters(),
            LEFT_OUT_TEXT,
            *(f"| `{path}` | {reason} |\n" for path, reason in sorted(PARAMETERS_LEFT_OUT.items())),
            METHODS_TEXT,
            *(f"| `{path}` | {reason} |\n" for path, reason in sorted(METHODS.items())),
            NAMES_TEXT,
            *_names(),
        ]
    )


def _parameters() -> Iterator[str]:
    for name, parameter in sorted(PARAMETERS.items()):
        accepted = ", ".join(f"`{value!r}`" for value in parameter.neutral)
        yield f"| `{name}` | {accepted} | {parameter.reason} |\n"


def _names() -> Iterator[str]:
    names_of: dict[str, list[str]] = {}
    for name, reason in NAMES.items():
        names_of.setdefault(reason, []).append(f"`{name}`")
    for reason, names in sorted(names_of.items()):
        yield f"| {reason} | {', '.join(sorted(names))} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
