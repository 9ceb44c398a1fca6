"""Checks of the built-in trainer at its start."""

from __future__ import annotations

import pytest

from clustertrain.config.checks.epochs import resolve_epochs
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.trainer import check_epoch_size


def test_data_of_another_length_than_the_epochs_were_computed_for_is_refused() -> None:
    recipe = resolve_epochs(build({"train": {"epochs": 2}}, Recipe, "recipe"), 100, 10)
    check_epoch_size(recipe, 100)
    with pytest.raises(ConfigError, match=r"computed for data.samples = 100, but the training data has 90"):
        check_epoch_size(recipe, 90)
    check_epoch_size(build({}, Recipe, "recipe"), 90)
