"""Time series: past values with their features, and future values and features."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memopt.walk.calls.arguments.documented import described
from memopt.walk.calls.arguments.request import LENGTH, Kwargs, Request
from memopt.walk.calls.arguments.singles import complete

#: A model of patches takes fewer of them; longer contexts than this are tried last.
_LONG = 512


def series(request: Request) -> Iterator[tuple[str, Kwargs]]:
    if "past_values" not in request.names:
        return
    context = request.whole("context_length", default=LENGTH)
    documented = described(request).get("past_values")
    dimensions = len(documented.shape) if documented else 3
    for length in dict.fromkeys((min(context, _LONG), context)):
        for channels in (dimensions == 3, dimensions != 3):
            form = "with channels" if channels else "of numbers"
            yield f"main:{length} steps {form}", complete(request, _past_and_future(request, length, channels))


def _past_and_future(request: Request, context: int, channels: bool) -> Kwargs:
    width = (request.whole("num_input_channels", "input_size", default=1),) if channels else ()
    lags = request.setting("lags_sequence", default=()) if "past_time_features" in request.names else ()
    past = (request.batch, context + max(lags, default=0))
    future = (request.batch, request.whole("prediction_length", default=1))
    times = request.whole("num_time_features", default=0)
    given: Kwargs = {"past_values": request.normal(*past, *width)}
    observed = torch.ones(*past, *width)
    if request.variant == "padded":
        observed[-1, : context // 4] = 0
    if "past_time_features" in request.names:
        given |= {
            "past_time_features": request.normal(*past, times),
            "past_observed_mask": observed,
            "future_values": request.normal(*future, *width),
            "future_time_features": request.normal(*future, times),
        }
    elif request.variant == "padded":
        given |= {name: observed for name in ("past_observed_mask", "observed_mask") if name in request.names}
    if categories := request.whole("num_static_categorical_features", default=0):
        given["static_categorical_features"] = torch.zeros(request.batch, categories, dtype=torch.long)
    if numbers := request.whole("num_static_real_features", default=0):
        given["static_real_features"] = request.normal(request.batch, numbers)
    given["past_values_padding"] = torch.zeros(past, dtype=torch.long)
    given["freq"] = torch.zeros(request.batch, 1, dtype=torch.long)
    return {name: value for name, value in given.items() if name in request.names}
