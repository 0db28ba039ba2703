"""``timeline()``: what is read from a trace, what is drawn of it, and what recording refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.profiler import profile

from fsdp_offload import HybridDeviceOptimizer
from fsdp_offload.core.errors import ConfigError
from fsdp_offload.core.storage import is_profiling
from fsdp_offload.optimizer.timeline import MARK, STEP, Span, legend, merged, spans_of, svg_of
from tests.helpers.compare import assert_same
from tests.helpers.own_optimizers import Lion
from tests.helpers.training import (
    Model,
    assert_explains,
    fill_gradients,
    pair,
    train,
    values,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TRACE = Path(__file__).parent / "timeline_gpu_trace.json"
"""Three iterations of 40 ms: compute on stream 7, updates on 13, copies on 17, 21 and 29."""
ADAM = "_adam_table"


def trace() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TRACE.read_text())
    return found


def events_named(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["name"] == name]


def busy(spans: list[Span]) -> dict[str, float]:
    rows = {span.row for span in spans} - {STEP}
    found = {row: merged([span for span in spans if span.row == row]) for row in rows}
    return {row: sum(end - start for start, end in found[row]) for row in rows}


def marks(spans: list[Span]) -> list[float]:
    return [span.start_ms for span in spans if span.row == STEP]


# --------------------------------------------------------------------------- reading


def test_rows_of_a_gpu() -> None:
    """Steps begin where the device got there, not the host."""
    spans = spans_of(trace())
    # Copies on two streams overlap: 6 ms and 6 ms within 8.
    expected = {"compute": 26.25, "collectives": 4, "updates": 5, "H2D": 8, "D2H": 7}
    assert busy(spans) == {row: 3 * ms for row, ms in expected.items()}
    assert min(span.start_ms for span in spans) == 0
    assert marks(spans) == [28, 68, 108]
    assert legend(spans) == [
        "busy, ms: compute 78.8, collectives 12.0, updates 15.0, H2D 24.0, D2H 21.0",
        "from step to step, ms: 40.0, 40.0",
    ]


def test_without_marks_of_the_device_those_of_the_host_count() -> None:
    found = trace()
    first = next(e for e in events_named(found, MARK) if e["cat"] == "gpu_user_annotation")
    found["traceEvents"].remove(first)
    # The first kernel comes 1 ms after the first operator, and 2 ms after recording began.
    assert marks(spans_of(found)) == [1, 5, 9]


def test_kernels_of_any_name_are_updates_where_steps_update() -> None:
    found, expected = trace(), spans_of(trace())
    for event in events_named(found, ADAM):
        event["name"] = "void at::native::vectorized_elementwise_kernel<4>"
    assert spans_of(found) == expected


def test_named_updates_are_found_outside_of_steps() -> None:
    """With ``overlap="backward"`` hooks launch them."""
    found, expected = trace(), spans_of(trace())
    found["traceEvents"] = [
        event
        for event in found["traceEvents"]
        if not (event["name"].startswith("Optimizer.step#") and event["tid"] == 13)
    ]
    assert spans_of(found) == expected


def test_updates_on_the_callers_stream_leave_the_rest_of_it_alone() -> None:
    """So a class that is not torch's updates."""
    found = trace()
    for event in found["traceEvents"]:
        if event.get("tid") == 13:
            event["tid"] = 7
            event["name"] = event["name"].replace(ADAM, "elementwise")
    assert busy(spans_of(found)) == busy(spans_of(trace()))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "updates"),
        ("_adam", "updates"),
        ("_pack", "updates"),
        ("_packed_attention", "compute"),
        ("triton_poi_fused_adam_0", "compute"),
        ("_copy_across", "host lane"),
        ("CopyHostToDevice", "H2D"),
        ("CopyDeviceToHost", "D2H"),
        ("Memcpy DtoD (Device -> Device)", "compute"),
    ],
)
def test_a_name_has_a_row(name: str, row: str) -> None:
    event = dict(ph="X", cat="kernel", name=name, pid=0, tid=41, ts=1000.0, dur=500.0)
    assert spans_of({"traceEvents": [event]}) == [Span(row, 0, 0.5)]


def test_without_a_device_operators_inside_of_steps_are_updates() -> None:
    found = trace()
    found["traceEvents"] = [e for e in found["traceEvents"] if e.get("pid") == 100]
    inside = dict(events_named(found, "aten::linear")[0], name="aten::_fused_adamw_")
    inside["ts"] += 2250
    found["traceEvents"].append(inside)
    assert busy(spans_of(found)) == {"compute": 1.5, "updates": 0.5}
    assert marks(spans_of(found)) == [2, 6, 10]


# --------------------------------------------------------------------------- drawing


def test_gaps_stay_unless_they_are_too_small_to_see() -> None:
    spans = [Span("H2D", 4, 5), Span("H2D", 0, 2), Span("H2D", 1, 3), Span("H2D", 0.5, 1)]
    assert merged(spans) == [(0, 3), (4, 5)]
    assert merged(spans, gap_ms=1) == [(0, 5)]


def test_the_picture_has_rows_boxes_marks_and_legend() -> None:
    spans = [Span("compute", 0, 40), Span("compute", 60, 100), Span("updates", 50, 60)]
    spans += [Span(STEP, at, at) for at in (40, 95)]
    svg = ElementTree.fromstring(svg_of(spans))
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert texts[:7] == [*map(str, range(0, 101, 20)), "ms"]
    assert texts[7:] == ["compute", "updates", "step()", "step()", *legend(spans)]

    drawn = [e.attrib["d"] for e in svg.iter() if "d" in e.attrib and "fill" in e.attrib]
    boxes = [
        [(float(x), float(width)) for x, width in re.findall(r"M([\d.]+) \d+h([\d.]+)", path)]
        for path in drawn
    ]
    left, per_ms = boxes[0][0][0], boxes[0][0][1] / 40
    assert boxes[0] == [(left, 40 * per_ms), (left + 60 * per_ms, 40 * per_ms)]
    assert boxes[1] == [(left + 50 * per_ms, 10 * per_ms)]


def test_a_picture_of_nothing_says_so() -> None:
    assert "busy, ms: nothing was recorded" in svg_of([])
    assert "fewer than two steps were recorded" in svg_of([Span(STEP, 0, 0)])


def test_thousands_of_kernels_make_a_small_picture() -> None:
    spans = [Span("compute", at / 100, at / 100 + 0.009) for at in range(100_000)]
    assert len(svg_of(spans)) < 5_000


# --------------------------------------------------------------------------- recording


def test_a_picture_of_training_on_the_cpu(tmp_path: Path) -> None:
    model, optimizer, plain_model, plain = pair("streamed", torch.optim.AdamW)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    with optimizer.timeline(tmp_path / "a.svg"):
        train(model, optimizer, range(3))
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count("step()") == 3
    assert re.search(r"busy, ms: compute \d+\.\d, updates \d+\.\d<", drawn)
    assert re.search(r"from step to step, ms: \d+\.\d, \d+\.\d<", drawn)

    train(plain_model, plain, range(3))
    assert_same(values(model), values(plain_model))
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    assert not is_profiling()


def steps_in(path: Path) -> int:
    """As the Chrome trace says."""
    return len(marks(spans_of(json.loads(path.read_text()))))


def test_a_trace_marks_each_step_once_whoever_calls_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    model, inner = Model(), None
    for cls in (torch.optim.SGD, Lion):
        inner = cls(model.parameters(), lr=0.1)
        bound = inner.step
        optimizer = HybridDeviceOptimizer(inner)
        with optimizer.timeline(path):
            train(model, optimizer, range(2))
            fill_gradients(model, 2)
            inner.step()
            if cls is torch.optim.SGD:
                bound()
        assert steps_in(path) == 3 + (cls is torch.optim.SGD)


def test_other_optimizers_steps_are_not_marked(tmp_path: Path) -> None:
    model, optimizer, other_model, other = pair("streamed")
    with optimizer.timeline(tmp_path / "a.json"):
        train(other_model, other, range(4))
        train(model, optimizer, range(2))
    assert steps_in(tmp_path / "a.json") == 2


@pytest.mark.parametrize("name", ["a.png", "a", "a.json.gz", "missing/a.svg", "folder.svg"])
def test_a_path_that_cannot_be_written_is_refused_first(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    optimizer = pair("streamed")[1]
    with pytest.raises(ConfigError, match=name) as error, optimizer.timeline(tmp_path / name):
        pytest.fail("it has begun")
    assert_explains(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_one_at_a_time(tmp_path: Path) -> None:
    optimizer = pair("streamed")[1]
    with optimizer.timeline(tmp_path / "a.json"):
        with pytest.raises(ConfigError, match="another timeline") as error:
            optimizer.timeline(tmp_path / "b.json").__enter__()
        assert is_profiling()  # the first one still does
    assert_explains(error.value)
    with profile(), pytest.raises(ConfigError, match="a profiler of torch"):
        optimizer.timeline(tmp_path / "b.json").__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_profiler_that_is_used_inside_is_noticed(tmp_path: Path) -> None:
    """torch would read a recording that has gone, and crash."""
    model, optimizer = pair("streamed")[:2]
    with pytest.raises(ConfigError, match="used inside"), optimizer.timeline(tmp_path / "a.svg"):
        with profile():
            train(model, optimizer, range(1))
    assert not list(tmp_path.iterdir())


def test_an_exception_is_passed_on_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text("before")
    model, optimizer = pair("streamed")[:2]
    hooks = len(optimizer._optimizer_step_pre_hooks)
    with pytest.raises(TypeError), optimizer.timeline(path):
        train(model, optimizer, 1)  # type: ignore[arg-type]
    assert path.read_text() == "before"
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    assert not is_profiling()
    with optimizer.timeline(path):
        train(model, optimizer, range(1))
    assert path.read_text().startswith("<svg")
