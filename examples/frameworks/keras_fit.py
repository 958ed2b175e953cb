"""Keras 3 on torch with `fit`. `--fault` plants a 0 that a loss takes the logarithm of.

whynan run keras_fit.py --fault
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).uniform(0.5, 1.5, (64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
if "--fault" in sys.argv:
    y[40] = 0.0


def relative(target, prediction):
    return ops.mean(ops.square(ops.log(target) - prediction))


model = keras.Sequential([layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dense(1)])
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=relative)
history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
print(f"loss {history.history['loss'][-1]!r}")
