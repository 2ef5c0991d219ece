"""The tasks by which accuracy is judged: their data are real and fixed, and a reduced form of each runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import digits, docstrings, sources, task


def test_docstrings_do_not_tell_their_package_by_its_name() -> None:
    """Different texts, the same in every process, without the label in them; none of a package that is not there."""
    texts = docstrings._docstrings("numpy", 20)
    assert len(set(texts)) == 20
    assert texts == docstrings._docstrings("numpy", 20)
    assert not any("numpy" in text.lower() for text in texts)
    assert docstrings._docstrings("a_package_that_is_not_there", 1) == []


def test_distorted_digits_are_the_same_each_time() -> None:
    """Digits move and turn, differ from one another, and are drawn from a fixed seed."""
    pytest.importorskip("sklearn")
    images, labels = digits._digits()
    assert (images.shape, labels.bincount().shape) == ((1797, 1, 8, 8), (10,))
    one, again = (digits._distorted(images[:1].repeat(8, 1, 1, 1), torch.Generator().manual_seed(0)) for _ in range(2))
    assert one.shape == (8, 3, 32, 32)
    assert torch.equal(one, again)
    assert (one[1:] - one[:1]).abs().amax((1, 2, 3)).min() > 0.5


def test_held_out_sources_are_not_learnt() -> None:
    """No window of bytes is on both sides but by chance."""
    seen, held_out = sources._windows()
    assert len(seen) > 5 * len(held_out) > 1000
    assert not {bytes(row.tolist()) for row in seen.to(torch.uint8)} & {
        bytes(row.tolist()) for row in held_out.to(torch.uint8)
    }


def test_trained_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained once, read afterwards."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    trainings = []

    def train(model: nn.Module) -> None:
        trainings.append(model)
        nn.init.constant_(model.weight, 3.0)

    for _ in range(2):
        model = task.trained(nn.Linear(2, 2), "linear", task, train)
        assert model.weight.eq(3).all()
        assert not model.training
    assert len(trainings) == 1


def test_differences_are_points_and_percent() -> None:
    """Accuracies are subtracted, perplexities divided; the standard error is that of what changed item by item."""
    accuracy, perplexity = command.TASKS[0], command.TASKS[-1]
    assert (accuracy.measure, perplexity.measure) == ("accuracy", "perplexity")
    before, after = torch.ones(100, dtype=torch.float64), torch.ones(100, dtype=torch.float64)
    before[:20], after[:21] = 0.0, 0.0
    assert (accuracy.score(before), accuracy.score(after)) == (pytest.approx(80), pytest.approx(79))
    assert accuracy.difference(after, before) == (pytest.approx(-1.0), pytest.approx(1.0))
    losses = torch.linspace(1.0, 3.0, 64, dtype=torch.float64)
    assert perplexity.score(losses) == pytest.approx(math.exp(2))
    difference, error = perplexity.difference(losses + math.log(1.05), losses)
    assert difference == pytest.approx(5.0)
    assert error == pytest.approx(0.0, abs=1e-9)  # every text got worse by the same share


def test_a_record_keeps_rows_of_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run replaces its own rows and keeps the others; a record of another size counts for nothing."""
    layer = nn.Linear(4, 3).eval()
    prepared = task.Prepared(layer, (), lambda call: (call(torch.eye(4)).argmax(1) == 0).double())
    tasks = tuple(task.Task(name, name, "accuracy", lambda size: prepared) for name in ("one", "other"))
    monkeypatch.setattr(command, "TASKS", tasks)
    path = tmp_path / "record.json"

    def recorded(*arguments: str) -> list[str]:
        command.main([*arguments, "--precision", "as-written", "--out", str(path)])
        results = json.loads(path.read_text())["results"]
        assert all(row["difference"] == row["standard_error"] == 0 and row["items"] == 4 for row in results)
        return [row["task"] for row in results]

    assert recorded("--tasks", "one") == ["one"]
    assert recorded("--tasks", "other") == ["one", "other"]
    assert recorded() == ["one", "other"]
    assert recorded("--size", "small", "--tasks", "other") == ["other"]


def _made_up(of: task.Task, differences: dict[str, float]) -> list[dict[str, object]]:
    row = {"task": of.name, "measure": of.measure, "float32": 50.0, "score": 50.0, "standard_error": 0.1}
    return [row | {"precision": change, "difference": difference} for change, difference in differences.items()]


@pytest.mark.parametrize(
    ("name", "difference", "change", "is_within"),
    [
        ("docstrings", -0.1, "bf16", True),
        ("docstrings", -0.11, "bf16", False),
        ("docstrings", 3.0, "bf16", True),  # better
        ("docstrings", math.nan, "bf16", False),
        ("resnet50", -0.21, "quantize-entropy", False),
        ("mobilenet_v2", -0.21, "quantize-entropy", True),
        ("llama", 4.9, "int4-weights", True),
        ("llama", 5.1, "int4-weights", False),
        ("llama", -5.1, "int4-weights", True),
        ("llama", 0.6, "int8-weights", False),
    ],
)
def test_what_is_beyond_its_limit_fails_the_run(
    name: str,
    difference: float,
    change: str,
    is_within: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After all rows are printed, each with whether its limit holds, and saved. In small size there are no limits."""
    monkeypatch.setattr(command, "rows", lambda of, *_: _made_up(of, {change: difference, "sparsity-0.5": -90.0}))
    arguments = ["--tasks", name, "--out", str(tmp_path / "record.json")]
    if is_within:
        command.main(arguments)
    else:
        with pytest.raises(SystemExit, match=f"beyond the limit: {name} {change}$"):  # a text: the status is 1
            command.main(arguments)
    assert len(json.loads((tmp_path / "record.json").read_text())["results"]) == 2
    _, limited, free = capsys.readouterr().out.splitlines()
    assert ("within its limit of" in limited, "BEYOND its limit of" in limited) == (is_within, not is_within)
    assert "limit" not in free
    command.main([*arguments, "--size", "small"])
    assert "its limit" not in capsys.readouterr().out


def test_recorded_figures_are_within_their_limits() -> None:
    """On every machine whose results are kept; each limit has a figure on one of them."""
    tasks = {task.name: task for task in command.TASKS}
    judged = {}
    for path in command.RESULTS.glob("*/accuracy.json"):
        record = json.loads(path.read_text())
        assert record["size"] == "full"
        for row in record["results"]:
            holds = tasks[row["task"]].holds(row["precision"], row["difference"])
            if holds is not None:
                judged[path.parent.name, row["task"], row["precision"]] = holds
    assert [figure for figure, holds in judged.items() if not holds] == []
    assert {figure[1:] for figure in judged} == {
        (task.name, change) for task in command.TASKS for change in task.limits
    }


@pytest.mark.full
@pytest.mark.parametrize("name", [task.name for task in command.TASKS])
def test_a_reduced_form_of_each_task_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model does better than chance, the compiled one as well as eager, 256 clusters nearly; the record says so."""
    pytest.importorskip("sklearn")
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    arguments = [
        "--size",
        "small",
        "--tasks",
        name,
        "--precision",
        "as-written",
        "clusters-256",
        "--out",
        str(tmp_path / "record"),
    ]
    command.main(arguments)
    as_written, clusters = json.loads((tmp_path / "record").read_text())["results"]
    assert (as_written["precision"], clusters["precision"]) == ("as-written", "clusters-256")
    assert abs(as_written["difference"]) < 0.6  # one image of 200 may lie on the border of two
    assert abs(clusters["difference"]) < 3
    if as_written["measure"] == "accuracy":
        assert as_written["float32"] > 20
    else:
        assert as_written["float32"] < 100
