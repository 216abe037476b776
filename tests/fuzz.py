"""Random configurations against the large batch, by hypothesis.

    python tests/fuzz.py --minutes 30                 # one device
    python tests/fuzz.py --examples 200 --replicas 2  # two logical devices, one strategy
    python tests/fuzz.py --examples 200 --recompute
    python tests/fuzz.py --only "route=step model=gru mode=graph"

Each `Configuration` is trained as the package does, and as plain Keras does on the large
batch: the same samples, one update for each window, eagerly, on one device, with dense
gradients (Keras itself errs with those of embeddings that repeat rows). It passes if
weights, slots, iterations, loss scale, and in the step the logs, agree, or if the package
has said that they may not. What fails is made as simple as it can be, and printed as one
line that `--only` runs again.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import os
import pathlib
import re
import sys
import time
import traceback
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from fuzz_configurations import OWN_STEPS, parse, simplest, stream
from fuzz_parts import (
    batches_of,
    called_loss,
    joined,
    loss_of,
    metrics_of,
    model_of,
    optimizer_of,
    policy,
    split_of,
    sums,
    wrapped,
)

import keras_accum as ka

PACKAGE = str(pathlib.Path(ka.__file__).parent)
# Of what was reached, how far two runs may be apart: relative to the change of an array,
# to its size, and to the largest change of all.
TOLERANCES = {
    "float32": (1e-4, 3e-6, 1e-5),
    "float64": (1e-4, 3e-6, 1e-5),
    "all_float64": (1e-8, 1e-10, 1e-10),
    "part_float64": (1e-4, 3e-6, 1e-5),
    "mixed_bfloat16": (1e-1, 1e-2, 3e-2),
    "mixed_float16": (2e-2, 2e-3, 5e-3),
    "part_float16": (2e-2, 2e-3, 5e-3),
}
ADAPTIVE = ("adam", "adamw", "rmsprop")
# A warning that explains numbers other than the large batch's has one of these words;
# one of a metric explains no weights.
EXPLAINS = re.compile("two_pass|per sample|weight|denominator|reduction|accumulate")
OF_METRIC = re.compile("^The metric")


@dataclasses.dataclass
class Run:
    """What a training run came to."""

    initial: list
    weights: list
    slots: list
    iterations: int
    scale: float | None
    logs: dict


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a configuration ended.

    Attributes:
        status: "equal"; "warned", of numbers that differ; "cautious", warned of numbers
            that are equal; "refused"; "impossible", in plain Keras too; or what fails:
            "mismatch", "crash", and "needless", a warning or refusal where all is known.
        detail: what was said, or how far the two runs are apart.
    """

    status: str
    detail: str = ""

    @property
    def failed(self):
        return self.status in ("mismatch", "crash", "needless")


# --------------------------------------------------------------------------- training


class Sequence(keras.utils.PyDataset):
    """Batches as they are."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, i):
        return _without_none(self.batches[i])


def _without_none(batch):
    return batch[:2] if batch[2] is None else batch


def large_batch(c):
    """The run of plain Keras: each window is one batch."""
    keras.utils.set_random_seed(c.seed)
    plain = dataclasses.replace(c, recompute="none", mode="eager")
    if plain.route not in OWN_STEPS:
        plain = dataclasses.replace(plain, route="step")
    model, batches = model_of(plain), batches_of(c)
    optimizer = densified(optimizer_of(c))
    _compile(plain, model, optimizer, oracle=True)
    if c.form == "subclass":
        model(batches[0][0])
    optimizer.build(model.trainable_variables)
    initial = model.get_weights()
    windows = [joined(c, [batches[i] for i in window]) for window in c.windows]
    # Without any update, plain Keras only says whether it can train at all.
    before = None if windows else _run_of(model, optimizer, initial, {})
    windows = windows or batches[:1]
    if _logs_are_kept(c) and c.feed != "train_on_batch":
        logs = _fit(model, Sequence(windows), _class_weight(c))
    else:
        logs = _one_by_one(c, model, windows)
        if not (c.looping or c.feed == "train_on_batch"):
            # As `fit` does at its end; it takes longer.
            optimizer.finalize_variable_values(model.trainable_variables)
    return before or _run_of(model, optimizer, initial, logs)


def densified(optimizer):
    """`optimizer`, given each gradient as one tensor, as of a matrix product."""
    apply = optimizer.apply

    def apply_dense(gradients, variables=None):
        dense = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        return apply(dense, variables)

    optimizer.apply = apply_dense
    return optimizer


def accumulated(c, strategy=None):
    """The run of the package."""
    keras.utils.set_random_seed(c.seed)
    batches = batches_of(c)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of(c)
        if c.route in ("step", "two_pass", "both", "both_two_pass"):
            ka.accumulate(model, **split_of(c), two_pass="two_pass" in c.route)
        optimizer = wrapped(c) if c.accumulating else optimizer_of(c)
        _compile(c, model, optimizer)
        if c.form == "subclass":
            # Built alone: with its weights in place, for the comparison of changes.
            model(batches[0][0])
    initial = model.get_weights()
    if c.looping:
        logs = _loop(c, model, optimizer, batches)
    elif c.feed == "train_on_batch":
        logs = _one_by_one(c, model, batches * c.epochs)
    else:
        logs = _fit(model, _feed(c, batches), _class_weight(c), **_options(c))
    if c.tail == "flush":
        optimizer.flush()
    return _run_of(model, optimizer, initial, logs)


def _compile(c, model, optimizer, oracle=False):
    model.compile(
        optimizer,
        loss=loss_of(c, oracle),
        run_eagerly=c.mode == "eager",
        jit_compile=c.mode == "xla",
        steps_per_execution=1 if oracle else c.steps_per_execution,
        **metrics_of(c),
    )
    own = c.route == "own_step_object"
    model.loss_object = called_loss(c, oracle) if own else None


def _class_weight(c):
    return {0: 0.3, 1: 2.0, 2: 1.0} if c.weights == "class" else None


def _options(c):
    options = {"epochs": c.epochs}
    if c.tail in ("flush_epoch", "flush_end", "drop"):
        options["callbacks"] = [ka.AccumulationMonitor(tail=c.tail)]
    if c.feed == "arrays":
        options["batch_size"] = c.sizes[0]
    return options


def _fit(model, data, class_weight, **options):
    arrays = data if isinstance(data, tuple) else (data,)
    if len(arrays) > 1:
        x, y, weight = arrays
        arrays, options = (x, y), options | {"sample_weight": weight}
    history = model.fit(
        *arrays, class_weight=class_weight, shuffle=False, verbose=0, **options
    )
    return {name: values[-1] for name, values in history.history.items()}


def _feed(c, batches):
    """The batches in the form that `fit` is to get them in."""
    if c.feed == "arrays":
        return joined(c, batches)
    if c.feed == "sequence":
        return Sequence(batches)
    if c.feed == "generator":
        return (_without_none(batch) for batch in batches)
    make = lambda: iter([_without_none(batch) for batch in batches])  # noqa: E731
    one = _without_none(batches[0])
    spec = tf.nest.map_structure(functools.partial(_spec, c), one)
    dataset = tf.data.Dataset.from_generator(make, output_signature=spec)
    if c.feed == "dataset":
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
    return dataset


def _spec(c, array):
    sizes = list(array.shape[1:])
    if c.lengths in ("trimmed", "unmasked") and sizes:
        sizes[0] = None
    return tf.TensorSpec([None, *sizes], array.dtype)


def _one_by_one(c, model, batches):
    logs = {}
    for x, y, weight in batches:
        logs = model.train_on_batch(
            x, y, weight, class_weight=_class_weight(c), return_dict=True
        )
    return logs


def _loop(c, model, optimizer, batches):
    """A loop of the user's own: see `ROUTES`."""
    variables = model.trainable_variables
    optimizer.build(variables)
    step = _gradients_step if c.route.startswith("gradients") else _tape_step
    step = functools.partial(step, c, model, optimizer)
    if c.mode != "eager":
        step = tf.function(step, jit_compile=c.mode == "xla", reduce_retracing=True)
    for batch in batches * c.epochs:
        given = [a for a in batch if a is not None]
        step(tf.nest.map_structure(tf.convert_to_tensor, tuple(given)))
    return {}


def _tape_step(c, model, optimizer, batch):
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), weight)
        scaled = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
    said = _weight_by_hand(c, y, weight) if c.route == "loop_weight" else None
    optimizer.apply(gradients, model.trainable_variables, weight=said)


def _weight_by_hand(c, y, weight):
    """What the mean loss of a batch without a mask is divided by."""
    if c.reduction == "sum":
        return None
    if c.reduction == "mean_with_sample_weight" and weight is not None:
        return _sum_of(weight)
    return tf.cast(tf.shape(y)[0], "float32")


def _sum_of(weight):
    """As Keras adds weights up: in the dtype of the loss."""
    return tf.reduce_sum(tf.cast(weight, keras.config.floatx()))


def _gradients_step(c, model, optimizer, batch):
    def loss_fn(part):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(part)
        loss = model.compute_loss(x, y, model(x, training=True), weight)
        if c.reduction == "mean_with_sample_weight" and weight is not None:
            return loss, _sum_of(weight)
        return loss

    _, gradients = ka.accumulate_gradients(
        loss_fn,
        model.trainable_variables,
        batch,
        **split_of(c),
        reduction="sum" if sums(c) else "mean",
        scale_loss=optimizer.scale_loss,
    )
    if not c.accumulating:
        optimizer.apply(gradients, model.trainable_variables)
        return
    y, weight = (*batch, None)[1:3]
    optimizer.apply(
        gradients, model.trainable_variables, weight=_weight_by_hand(c, y, weight)
    )


def _run_of(model, optimizer, initial, logs):
    inner = optimizer
    while (inside := getattr(inner, "inner_optimizer", None)) is not None:
        inner = inside
    scale = getattr(optimizer, "dynamic_scale", None)
    if not getattr(optimizer, "scales_dynamically", True):
        scale = None
    return Run(
        initial,
        model.get_weights(),
        [v.numpy() for v in inner.variables],
        int(keras.ops.convert_to_numpy(inner.iterations)),
        None if scale is None else float(keras.ops.convert_to_numpy(scale)),
        logs,
    )


# ------------------------------------------------------------------------- comparison


def check(c, strategy=None):
    """The `Outcome` of a configuration."""
    outcome = _compare(c, strategy)
    spoken = outcome.status in ("warned", "cautious", "refused")
    if spoken and is_known(c):
        return Outcome("needless", outcome.detail)
    return outcome


def is_known(c):
    """Whether Keras alone says what each loss divides by, so that all has to be exact."""
    if not c.windows or c.compute_loss != "keras":
        return False
    if c.loss in ("scalar", "total", "coupled") or c.metrics == "scalar":
        return False
    if c.route in ("own_step_object", "own_step_twice"):
        return False
    if not c.accumulating:
        return True
    return c.outputs == 1 and c.added == "none"


def _compare(c, strategy):
    filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        with policy(c), np.errstate(all="ignore"):
            return _compare_in_policy(c, strategy)
    finally:
        if filtering:
            keras.config.enable_traceback_filtering()


def _compare_in_policy(c, strategy):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = _expected(c, strategy)
    except Exception as error:
        return Outcome("impossible", _say(error))
    said = []
    with _hearing(said):
        try:
            found = accumulated(c, strategy)
        except Exception as error:
            if "yielded an element of shape" in str(error):
                # Keras reads shapes off two batches, and others follow.
                return Outcome("impossible", _say(error))
            if c.route == "own_step_object" and "Shapes of all inputs" in str(error):
                # Of no samples on a replica, Keras's loss is a vector, which it logs.
                return Outcome("impossible", _say(error))
            return Outcome("refused" if _is_refusal(error) else "crash", _say(error))
    if _diverged(expected):
        return Outcome("impossible", "the large batch itself diverges")
    gap = difference(c, found, expected)
    explained = [text for text in said if EXPLAINS.search(text)]
    if re.match("(weights|slots|iterations|loss scale)", gap):
        explained = [text for text in explained if not OF_METRIC.search(text)]
    if gap:
        return Outcome(*("warned", explained[0]) if explained else ("mismatch", gap))
    return Outcome(*("cautious", explained[0]) if explained else ("equal",))


def _diverged(run):
    """Whether weights have grown so much that rounding has, too."""
    return max(np.abs(w).max(initial=0) for w in run.weights) > 1e3


def _expected(c, strategy):
    if c.random == "none":
        return large_batch(c)
    return accumulated(dataclasses.replace(c, recompute="none"), strategy)


@contextlib.contextmanager
def _hearing(said):
    """Collect what is warned of, and logged as a warning by the package."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("keras_accum")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
        said += [str(w.message) for w in caught if w.category is UserWarning]


def _is_refusal(error):
    """Whether the package raised it, by name and on purpose."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = last.filename.startswith(PACKAGE) and "raise" in (last.line or "")
    return raised and isinstance(error, (ValueError, TypeError))


def _say(error):
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(PACKAGE)] or frames[-1:]
    where = f"{pathlib.Path(own[-1].filename).name}:{own[-1].lineno}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {where}: {text[:150]} ... {text[-150:]}"


def difference(c, found, expected):
    """What of two runs differs, as a text; empty if nothing does."""
    gaps = [
        _gap(c, "weights", found.initial, found.weights, expected.weights),
        _gap(c, "slots", None, found.slots, expected.slots),
    ]
    if found.iterations != expected.iterations:
        gaps.append(f"iterations {found.iterations} for {expected.iterations}")
    if c.accumulating and found.scale != expected.scale:
        gaps.append(f"loss scale {found.scale} for {expected.scale}")
    if _logs_are_kept(c):
        gaps += [_log_gap(c, name, found.logs, expected.logs) for name in expected.logs]
    return "; ".join(gap for gap in gaps if gap)


def _gap(c, what, initial, found, expected):
    if len(found) != len(expected):
        return f"{len(found)} {what} for {len(expected)}"
    initial = initial or [np.zeros_like(e) for e in expected]
    finite = lambda a: float(np.abs(a[np.isfinite(a)]).max(initial=0))  # noqa: E731
    usual = np.median([finite(e) for e in expected] or [0])
    moved = [finite(e - i) for e, i in zip(expected, initial)]
    by_change, by_size, by_all = TOLERANCES[c.policy]
    worst, name = 0.0, ""
    for i, (f, e) in enumerate(zip(found, expected)):
        if f.shape != e.shape:
            return f"{what}[{i}] of shape {f.shape} for {e.shape}"
        bound = by_change * moved[i] + by_size * finite(e) + by_all * max(moved)
        if what == "slots":  # Of which some are counters, or rates.
            bound = (by_change + by_size) * (finite(e) + usual)
        bound *= 10 if c.optimizer in ADAPTIVE else 1
        same = np.array_equal(np.isfinite(f), np.isfinite(e))
        off = finite(f - e) / max(bound, 1e-12) if same else np.inf
        if off > worst:
            worst = off
            name = f"{what}[{i}] off by {finite(f - e):.1e}, moved {moved[i]:.1e}"
    return name if worst > 1 else ""


def _logs_are_kept(c):
    """Whether the logs of the run are those of the large batches, by contract."""
    return not (c.accumulating or c.looping or c.route in OWN_STEPS or c.epochs > 1)


def _log_gap(c, name, found, expected):
    if name not in found:
        return f"no log of {name}"
    tolerance = 20 * sum(TOLERANCES[c.policy][1:])
    f, e = float(found[name]), float(expected[name])
    if np.isnan(e) and np.isfinite(f):
        return ""  # Keras logs 0/0 for a batch without any value; here it weighs nothing.
    if np.isclose(f, e, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"log of {name}: {f:.6g} for {e:.6g}"


# ----------------------------------------------------------------------------- search


@dataclasses.dataclass
class Found:
    """What a search has seen: configurations, outcomes, and what failed, made simple."""

    outcomes: list = dataclasses.field(default_factory=list)
    failures: list = dataclasses.field(default_factory=list)

    def __str__(self):
        counts = collections.Counter(outcome.status for _, outcome in self.outcomes)
        lines = [f"{len(self.outcomes)} configurations: {dict(counts.most_common())}"]
        for status in ("warned", "cautious", "refused", "impossible"):
            texts = collections.Counter(
                outcome.detail[:100]
                for _, outcome in self.outcomes
                if outcome.status == status
            )
            lines += [f"  {status} {n}: {text}" for text, n in texts.most_common(12)]
        return "\n".join([*lines, *(_line(*failure) for failure in self.failures)])


def _line(c, outcome):
    return f'FAILED, {outcome.status}: {outcome.detail}\n  --only "{c}"'


def search(drawn, seconds=None, strategy=None, failures="simplify", report=None):
    """Check configurations; returns what was `Found`.

    Args:
        drawn: the configurations.
        seconds: after which to check no more.
        strategy: where to train.
        failures: "simplify" what fails, "keep" it as drawn, or "stop" there.
        report: called with each configuration, its outcome, and the CPU seconds.
    """
    found, until = Found(), time.monotonic() + (seconds or float("inf"))
    for count, c in enumerate(drawn, 1):
        began = time.process_time()
        outcome = check(c, strategy)
        found.outcomes.append((c, outcome))
        if report:
            report(c, outcome, time.process_time() - began)
        if outcome.failed:
            failure = c, outcome
            if failures == "simplify":
                failure = simplified(c, outcome, strategy)
                print(_line(*failure), flush=True)
            if failure not in found.failures:
                found.failures.append(failure)
        if (found.failures and failures == "stop") or time.monotonic() > until:
            break
        if count % 50 == 0:
            keras.backend.clear_session()  # Which collects garbage, too.
    return found


def simplified(c, outcome, strategy=None):
    """The simplest configuration near `c` that fails with the same status."""
    outcomes = {c: outcome}

    def fails(simpler):
        if simpler not in outcomes:
            outcomes[simpler] = check(simpler, strategy)
        return outcomes[simpler].status == outcome.status

    simple = simplest(c, fails)
    return simple, outcomes[simple]


def two_replicas():
    """A strategy of two logical devices; TensorFlow wants one of them in a process."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def main(arguments):
    """Run the command line; returns 1 if a configuration failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help="when to stop; by default 1")
    parser.add_argument("--examples", type=int, help="how many to check at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, choices=(1, 2), default=1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--as-drawn", action="store_true", help="simplify no failure")
    parser.add_argument("--avoid", help="leave out lines with this regular expression")
    parser.add_argument("--verbose", action="store_true", help="print each line")
    parser.add_argument("--only", help="a configuration, as a failure prints it")
    options = parser.parse_args(arguments)
    gc.freeze()  # What was imported is no garbage to look through.
    only = options.only and parse(options.only)
    replicas = only.replicas if only else options.replicas
    strategy = two_replicas() if replicas > 1 else None
    if only:
        outcome = check(only, strategy)
        print(outcome.status, outcome.detail)
        return int(outcome.failed)
    drawn = stream(options.seed, replicas=replicas, recompute=options.recompute)
    if options.avoid:
        drawn = (c for c in drawn if not re.search(options.avoid, str(c)))
    drawn = itertools.islice(drawn, options.examples)
    minutes = options.minutes or (None if options.examples else 1.0)
    found = search(
        drawn,
        minutes and 60 * minutes,
        strategy,
        "keep" if options.as_drawn else "simplify",
        _print if options.verbose else None,
    )
    print(found)
    return int(bool(found.failures))


def _print(c, outcome, seconds):
    print(f"{seconds:5.2f} s  {outcome.status:10} {c} | {outcome.detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
