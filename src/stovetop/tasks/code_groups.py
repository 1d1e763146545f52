"""Programming problems as groups of tries, for a workflow of reinforcement learning, and the sandbox that their answers
are graded in.
"""

from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.rl import Builders
from stovetop.renderers.base import Renderer
from stovetop.runs import Run
from stovetop.tasks import code_grading
from stovetop.tasks.code import CodeProblems
from stovetop.tasks.code_grading import CodeGrader
from stovetop.tasks.sandbox import Limits, find_sandbox


@stage(writes="grader")
def find_grader(test_time_s: float = 6.0, max_sandboxes: int = 4) -> CodeGrader:
    """Runs programs, and compares what comes of them with their tests. Replace it for a sandbox of your own."""
    return CodeGrader(find_sandbox(), Limits(time_s=test_time_s), max_at_once=max_sandboxes)


@stage(writes=("builders", "test_builders"))
def build_code_groups(
    code_problems: CodeProblems,
    renderer: Renderer,
    grader: CodeGrader,
    group_size: int,
    run: Run,
    max_prompt_tokens: int | None = None,
) -> Builders:
    """`group_size` tries at each problem, and one at those held out."""
    train, test = (
        code_grading.builders(problems, renderer, size, grader, max_prompt_tokens=max_prompt_tokens)
        for problems, size in ((code_problems.train, group_size), (code_problems.test, 1))
    )
    run.emit("rl.env_group_built", num_train=len(train), num_test=len(test), group_size=group_size)
    return Builders(train, test)
