"""Prints the elements of ``make_dataset(as_supervised=...)``, and trains Keras on them."""

import json
import sys

import keras

from cachetool.core.errors import UsageError
from cachetool.loaders.tensorflow import make_dataset

cache = sys.argv[1]
out = {}
batches = make_dataset(cache, batch_size=8, as_supervised=("array", "number"))
pairs = [(array.numpy(), number.numpy()) for array, number in batches]
out["numbers"] = sorted(int(n) for _, numbers in pairs for n in numbers)
out["shapes"] = sorted({str(array.shape[1:]) for array, _ in pairs})
several = make_dataset(cache, batch_size=8, as_supervised=(["array", "ragged"], "label", "weight"), where={"label": 1})
out["several"] = [len(batch) for batch in several.take(1)] + [len(batch[0]) for batch in several.take(1)]
out["rows"] = sum(int(batch[0][1].nrows()) for batch in several)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
train = make_dataset(cache, batch_size=8, as_supervised=("array", "weight"), repeat=True)
history = model.fit(train, steps_per_epoch=4, epochs=2, verbose=0)
out["epochs"] = len(history.history["loss"])
out["refused"] = []
for wrong, more in (
    ("array", {}),
    (("array",), {}),
    (("array", 3), {}),
    (("array", "nothing"), {}),
    (("array", "label"), {"fields": ["array"]}),
    (([], "label"), {}),
):
    try:
        make_dataset(cache, batch_size=8, as_supervised=wrong, **more)
        out["refused"].append("")
    except UsageError as error:
        out["refused"].append(str(error))
print(json.dumps(out))
