"""Groups to play of an environment that the config names or gives, instead of one made of rows of problems:
`REINFORCEMENT.remove("load_problems").replace("build_env_group", build_env_group_of)`."""

from collections.abc import Callable, Mapping, Sequence

from stovetop.errors import UnknownName
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.rl import Builders
from stovetop.renderers.base import Renderer
from stovetop.rl.problem_env import ProblemGroupBuilder
from stovetop.rl.types import Env, EnvGroupBuilder
from stovetop.runs import Run

Environment = str | EnvGroupBuilder | Sequence[EnvGroupBuilder] | Callable[[], Env]
Environments = Mapping[str, Callable[[Renderer, int], Builders]]  # name -> (renderer, group_size) -> builders


@stage(writes=("builders", "test_builders"))
def build_env_group_of(
    environment: Environment, renderer: Renderer, group_size: int, run: Run, environments: Environments | None = None
) -> Builders:
    """Of a name, what the port `environments` has by it; of builders, these; of a function that makes one environment,
    `group_size` of it."""
    built = _built(environment, renderer, group_size, environments or {})
    num_train, num_test = len(built.builders), len(built.test_builders)
    run.emit("rl.env_group_built", num_train=num_train, num_test=num_test, group_size=group_size)
    return built


def _built(environment: Environment, renderer: Renderer, group_size: int, environments: Environments) -> Builders:
    if isinstance(environment, str):
        if environment not in environments:
            raise UnknownName("environment", environment, environments, hint="they come from the port `environments`")
        return environments[environment](renderer, group_size)
    if isinstance(environment, Sequence):
        return Builders(environment, [])
    return Builders([ProblemGroupBuilder(environment, group_size) if callable(environment) else environment], [])
