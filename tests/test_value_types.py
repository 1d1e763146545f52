"""The public attributes of the values that programs of users read and write. A new name for one breaks these programs:
it needs a line in CHANGELOG.md, and then one here.
"""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import stovetop
from stovetop import types
from stovetop.checkpoints import CheckpointRecord
from stovetop.completers import TokensWithLogprobs
from stovetop.preference.types import Comparison, LabeledComparison
from stovetop.rl import types as rl_types
from stovetop.rl.data_processing import DatumMetadata
from stovetop.rl.rollouts import Rollouts

ATTRIBUTES: dict[type, str] = {
    types.ModelInput: "chunks",
    types.EncodedTextChunk: "tokens type",
    types.ImageChunk: "data format expected_tokens type",
    types.TensorData: "array",
    types.Datum: "model_input loss_fn_inputs model_input_spans loss_fn_input_spans",
    types.AdamParams: "learning_rate beta1 beta2 eps weight_decay grad_clip_norm",
    types.LoraConfig: "rank seed train_unembed train_mlp train_attn alpha",
    types.SamplingParams: "max_tokens seed stop temperature top_k top_p",
    types.ForwardBackwardOutput: "loss_fn_output_type loss_fn_outputs metrics",
    types.OptimStepResponse: "metrics",
    types.SampleResponse: "sequences prompt_logprobs topk_prompt_logprobs prompt_cache_hit_tokens "
    "target_prompt_logprobs",
    types.SampledSequence: "stop_reason tokens logprobs sequence_id topk_logprobs",
    TokensWithLogprobs: "tokens maybe_logprobs stop_reason",
    rl_types.StepResult: "reward episode_done next_observation next_stop_condition metrics stop_reason num_tool_calls "
    "trainable logs",
    rl_types.Transition: "ob ac reward episode_done metrics trainable logs chat",
    rl_types.Trajectory: "transitions final_ob stop_reason final_chat notes",
    rl_types.TrajectoryGroup: "trajectories_G final_rewards_G metrics_G",
    Rollouts: "owned_groups_P num_errors num_rollouts_dropped num_groups_skipped",
    DatumMetadata: "group_idx traj_idx",
    Comparison: "prompt_conversation completion_A completion_B",
    LabeledComparison: "comparison label",
    CheckpointRecord: "name batch epoch final state_path sampler_path extras policy_paths trained_ahead reference_path",
}


@pytest.mark.parametrize("value_type", ATTRIBUTES, ids=lambda value_type: value_type.__name__)
def test_public_attributes_keep_their_names_and_order(value_type: type):
    assert " ".join(field.name for field in fields(value_type)) == ATTRIBUTES[value_type]


def test_the_glossary_explains_every_suffix_that_files_outside_the_engine_list():
    root = Path(stovetop.__file__).parent
    glossary = (root.parent.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `_([A-Z])` \|", glossary, re.MULTILINE))
    listed = {
        letter
        for file in root.rglob("*.py")
        if "engine" not in file.parts
        for legend in re.findall(r"^Shape(?: suffixe)?s: .*(?:\n.+)*", file.read_text(encoding="utf-8"), re.MULTILINE)[
            :1
        ]
        for letter in re.findall(r"`([A-Z])`", legend)
    }
    assert {"P", "G", "D", "N", "K", "V"} <= listed <= explained
    assert {"P", "G", "D", "T", "N", "V", "K"} <= explained
