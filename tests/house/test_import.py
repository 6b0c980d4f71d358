"""What an import brings along: schedules need no torch, and every public name is found when it is used."""

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

import penstock

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"  # any import of torch now fails


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.ranks
def test_schedules_are_built_proved_and_timed_without_torch():
    code = """
import penstock as ps
schedule = ps.schedule.build("1f1b", 4, 8)
print(ps.schedule.verify(schedule).transfers, ps.schedule.simulate(schedule).makespan)
try:
    ps.schedule.build("1f1", 4, 8)
except ps.ScheduleError as error:
    print(isinstance(error, ps.PenstockError))
"""
    assert run(WITHOUT_TORCH + code).split() == ["48", "33.0", "True"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "statement",
    [
        "import penstock",
        "import penstock.schedule",
        "from penstock import PenstockError, ScheduleError, MismatchError, StageError, LostRankError",
        "from penstock.schedule import catalog, program, table, verify",
        "import penstock; dir(penstock); penstock.schedule.names()",
        "from penstock.plan import LayerCost, Plan, load, plan",
    ],
)
def test_an_import_that_needs_no_torch_does_not_load_it(statement):
    assert run(f"{statement}\nimport sys; print('torch' in sys.modules)") == "False"
    run(WITHOUT_TORCH + statement)


@pytest.mark.ranks
def test_a_pipeline_is_imported_without_torchs_compiler():
    heavy = "{'torch._dynamo', 'torch._inductor', 'torch.distributed.fsdp', 'torch.distributed.tensor', 'torch.export'}"
    code = "import torch, sys; before = {*sys.modules}; import penstock; penstock.Pipeline"
    assert run(f"{code}; print(*({heavy} & {{*sys.modules}}) - before)") == ""


@pytest.mark.slow
@pytest.mark.ranks
def test_only_the_command_line_needs_tyro():
    code = "import sys; sys.modules['tyro'] = None\nimport penstock\nfor name in penstock.__all__: getattr(penstock, name)"
    run(f"{code}\nimport penstock.pipeline, penstock.plan, penstock.learn, penstock.view")


def test_every_public_name_is_there():
    assert dir(penstock) == sorted(penstock.__all__)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


def test_what_is_not_public_is_not_there():
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'pipelines'"):
        _ = penstock.pipelines


def test_no_public_name_is_hidden_by_a_module_of_that_name():
    # `import penstock.launch` would bind the module where `ps.launch(...)` looks for the function
    for name in penstock.__all__:
        if not isinstance(getattr(penstock, name), ModuleType):
            assert importlib.util.find_spec(f"penstock.{name}") is None, name
