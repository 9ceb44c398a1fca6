"""``python -m clustertrain.train.tools.data_size REQUEST``: the number of a recipe's training samples, as JSON.

It is a separate process because it imports torch and the user's code.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ClusterTrainError
from clustertrain.train.data.datasets import build_datasets
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.data.streams.source import StreamSource
from clustertrain.train.tools import json_process


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"samples": ...}``, or ``{"error", "fix"}`` if the recipe, the data or the user's code is wrong."""
    recipe = build(request, Recipe, "recipe")
    try:
        train = build_datasets(recipe, Limits()).train
        if isinstance(train, StreamSource):
            return {
                "error": f"{recipe.data.description} is a stream, whose number of samples is not known",
                "fix": "set data.samples, or train.steps instead of the keys in epochs",
            }
        return {"samples": len(train)}
    except ClusterTrainError as e:
        return {"error": e.message, "fix": e.fix}
    except (Exception, SystemExit) as e:  # the user's function or dataset may raise anything
        last_line = traceback.format_exception_only(e)[-1].strip().splitlines()[0]
        return {
            "error": f"{recipe.data.description}: the samples cannot be counted: {last_line}",
            "fix": "set data.samples or train.steps, or correct the code, which would fail the same way on every rank",
        }


if __name__ == "__main__":
    sys.exit(json_process.run(handle_request))
