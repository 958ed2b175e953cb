"""Keras 3 on torch: its optimizers are not torch's; a bad batch leaves no mark on weights, moments and statistics all the same."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

import textwrap

import numpy as np
import pytest
from conftest import Sandbox, Shown

keras = pytest.importorskip("keras")

PROGRAM = """
    import os, sys
    os.environ["KERAS_BACKEND"] = "torch"
    import keras, numpy as np
    from keras import layers, ops

    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).uniform(0.5, 1.5, (48, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    if {bad}:
        y[16:24] = 0.0
    else:
        x, y = np.delete(x, range(16, 24), 0), np.delete(y, range(16, 24), 0)

    def relative(target, prediction):
        return ops.mean(ops.square(ops.log(target) - prediction))

    model = keras.Sequential([layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.{optimizer}, loss=relative)
    {callback}
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    print([c.incidents[0].cause.code for c in callbacks])
    weights = [*model.get_weights(), *(keras.ops.convert_to_numpy(v) for v in model.optimizer.variables)]
    np.savez("{out}", *[np.asarray(w) for w in weights])
"""
OWN = "from whynan.integrations.keras import WhynanCallback; callbacks = [WhynanCallback(files=False)]"


def state(box: Sandbox, name: str) -> list[np.ndarray]:
    loaded = np.load(box.folder / name)
    return [loaded[key] for key in loaded.files]


@pytest.mark.parametrize("optimizer", ["Adam(1e-2)", "SGD(1e-2, momentum=0.9)"])
def test_after_a_skipped_batch_everything_is_as_if_it_had_never_been_drawn(box: Sandbox, optimizer: str) -> None:
    watched = box.watched(PROGRAM.format(bad=True, optimizer=optimizer, callback="callbacks = []", out="watched.npz"))
    assert (watched.status, [(i["step"], i["cause"]["code"]) for i in watched.incidents]) == (0, [(2, "WN101")]), watched.err
    assert watched.incidents[0]["origin"]["code"].startswith("return ops.mean(ops.square(ops.log(target)")  # the user's line, not Keras's
    plain = box.watched(PROGRAM.format(bad=False, optimizer=optimizer, callback="callbacks = []", out="plain.npz"))
    assert plain.err == ""
    pairs = list(zip(state(box, "watched.npz"), state(box, "plain.npz"), strict=True))
    assert len(pairs) > 8
    assert all(np.array_equal(a, b) for a, b in pairs), watched.err


def test_the_callback_watches_a_script_that_is_run_by_python(box: Sandbox) -> None:
    done = box.python(str(box.write(PROGRAM.format(bad=True, optimizer="Adam(1e-2)", callback=OWN, out="own.npz"))))
    assert "['WN101']" in done.out, done.err
    assert "error[WN101]" in done.err
    assert all(np.isfinite(w).all() for w in state(box, "own.npz"))


def test_the_callback_of_the_page_watches_by_itself(box: Sandbox, shown: Shown) -> None:
    """The lines of the page in place of the program's own `fit`."""
    (block,) = shown("docs/integrations.md")
    source = textwrap.dedent(PROGRAM.format(bad=True, optimizer="Adam(1e-2)", callback="callbacks = []", out="page.npz"))
    before, made, after = source.partition("model.fit(")
    done = box.python(str(box.write(before + block + after.partition("\n")[2])))
    assert made and "error[WN101]" in done.err, done.err


def test_a_first_batch_that_is_bad_is_skipped_too(box: Sandbox) -> None:
    source = PROGRAM.format(bad=True, optimizer="Adam(1e-2)", callback="callbacks = []", out="first.npz").replace("y[16:24]", "y[0:8]")
    done = box.watched(source)
    assert (done.status, [i["step"] for i in done.incidents]) == (0, [0]), done.err
    assert all(np.isfinite(w).all() for w in state(box, "first.npz"))
