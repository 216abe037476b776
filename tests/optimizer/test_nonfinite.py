"""What a NaN or an infinity in a gradient does to its window, by `on_nonfinite`."""

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from helpers import (
    Batches,
    assert_close,
    assert_differ,
    assert_equal,
    assert_refused,
    compile_in,
    data,
    dense_model,
    in_mode,
    slots,
    state,
    variable,
)

import keras_accum as ka

WEIGHTS = [2.0, 5.0, 1.0, 3.0]
FIRST, MIDDLE, LAST = 0, 1, 3
VALUES = {FIRST: np.nan, MIDDLE: -np.inf, LAST: np.inf}

RAISED = (
    "A gradient holds an infinity or a NaN. Nothing was added to the window. Use "
    "on_nonfinite='skip_window' or 'skip_micro_batch' to train on without it."
)

without_xla = pytest.mark.parametrize("mode", ["eager", "graph"])


def inner():
    """All that must stand still when a window is skipped: slots, decay, schedule, EMA."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    return keras.optimizers.SGD(
        schedule, momentum=0.9, weight_decay=0.1, use_ema=True, ema_momentum=0.5
    )


def sgd():
    return keras.optimizers.SGD(0.1)


def two_variables():
    return [variable(1.0, -2.0, name="a"), variable(0.5, 3.0, -1.5, name="b")]


def gradients(seed):
    """Of both variables, in the four micro-batches of a window: all different."""
    rng = np.random.default_rng(seed)
    return [
        [rng.normal(1.0 + i, 1.0, size).astype("float32") for size in (2, 3)]
        for i in range(len(WEIGHTS))
    ]


def spoil(window, *positions):
    """One entry of one variable's gradient is not finite; the others stay."""
    spoiled = [[g.copy() for g in micro_batch] for micro_batch in window]
    for position in positions:
        spoiled[position][1][2] = VALUES[position]
    return spoiled


def without(window, *positions):
    """What is left of a window, and its weights."""
    rest = [i for i in range(len(WEIGHTS)) if i not in positions]
    return [window[i] for i in rest], [WEIGHTS[i] for i in rest]


class Accumulating:
    """Two variables and the optimizer under test, whose `apply` runs in `mode`."""

    def __init__(self, mode, policy, make=inner, **options):
        self.variables = two_variables()
        self.optimizer = ka.AccumOptimizer(make(), 4, on_nonfinite=policy, **options)
        self.optimizer.build(self.variables)
        self.apply = in_mode(
            lambda g, w: self.optimizer.apply(g, self.variables, w), mode
        )

    def step(self, micro_batch, weight):
        self.apply([tf.constant(g) for g in micro_batch], tf.constant(weight))

    def window(self, window):
        for micro_batch, weight in zip(window, WEIGHTS, strict=True):
            self.step(micro_batch, weight)

    @property
    def skipped(self):
        return counters(self.optimizer)


class Plain:
    """The same variables, and the plain optimizer on the mean of each window."""

    def __init__(self, make=inner):
        self.variables, self.optimizer = two_variables(), make()
        self.optimizer.build(self.variables)

    def window(self, window, weights=WEIGHTS):
        mean = reference.weighted_mean(window, weights)
        self.optimizer.apply([tf.constant(g, "float32") for g in mean], self.variables)


def assert_same(run, oracle):
    assert_close(run.variables, oracle.variables, what="weights")
    assert_close(slots(run.optimizer), slots(oracle.optimizer), what="slots")
    assert int(run.optimizer.iterations) == int(oracle.optimizer.iterations)


def counters(optimizer):
    return int(optimizer.skipped_windows), int(optimizer.skipped_micro_batches)


# --- skip_micro_batch


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_skipped_micro_batch_leaves_the_mean_of_the_rest(mode):
    run, oracle = Accumulating(mode, "skip_micro_batch"), Plain()
    for seed, bad in enumerate([(FIRST,), (MIDDLE,), (LAST,), (FIRST, LAST), ()]):
        window = gradients(seed)
        # With its weight counted, or with a gradient before it went bad, the update
        # is another.
        zeroed = [[g * (i not in bad) for g in m] for i, m in enumerate(window)]
        for other in (zeroed, window) if bad else ():
            control = Plain(sgd)
            control.window(other)
            rest = Plain(sgd)
            rest.window(*without(window, *bad))
            assert_differ(control.variables, rest.variables)
        run.window(spoil(window, *bad))
        oracle.window(*without(window, *bad))
        assert_same(run, oracle)
        assert run.skipped == (0, [1, 2, 3, 5, 5][seed])


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_window_of_skipped_micro_batches_is_skipped(mode):
    run, oracle, control = Accumulating(mode, "skip_micro_batch"), Plain(), Plain()
    for seed in (1, 2):
        run.window(gradients(seed))
        oracle.window(gradients(seed))
        control.window(gradients(seed))
        if seed == 1:
            run.window([[np.full_like(g, np.nan) for g in m] for m in gradients(3)])
            # An update with a gradient of zero would not be nothing.
            control.window([[np.zeros_like(g) for g in m] for m in gradients(3)])
    assert_same(run, oracle)
    assert_differ(run.variables, control.variables)
    assert run.skipped == (1, 4)


def test_a_micro_batch_skipped_from_a_sum_adds_nothing():
    run = Accumulating("graph", "skip_micro_batch", reduction="sum")
    run.window(spoil(gradients(1), MIDDLE))
    rest, weights = without(gradients(1), MIDDLE)
    oracle, control = Plain(), Plain()
    oracle.window([[3 * g for g in reference.weighted_mean(rest, [1.0] * 3)]], [1.0])
    control.window(rest, weights)
    assert_same(run, oracle)
    assert_differ(run.variables, control.variables)


@without_xla
def test_a_variable_that_only_a_skipped_micro_batch_reached_is_left_alone(mode):
    def make():
        return keras.optimizers.SGD(0.1, weight_decay=0.1)

    a, b = two_variables()
    optimizer = ka.AccumOptimizer(make(), 2, on_nonfinite="skip_micro_batch")
    optimizer.build([a, b])
    step = in_mode(lambda g: optimizer.apply(g, [a, b]), mode)
    step([tf.constant([np.nan, 1.0]), tf.constant([1.0, 2.0, 3.0])])
    step([tf.constant([3.0, 1.0]), None])

    c, d = two_variables()
    plain_optimizer = make()
    plain_optimizer.build([c, d])
    plain_optimizer.apply([tf.constant([3.0, 1.0])], [c])
    assert_close([a, b], [c, d])
    plain_optimizer.apply([tf.zeros(3)], [d])
    assert_differ([b], [d])


@pytest.mark.slow_in("eager")
@without_xla
def test_a_skipped_micro_batch_leaves_a_variable_to_be_overwritten_alone(mode):
    scale, weight = variable(5.0), variable(1.0)
    scale.overwrite_with_gradient = True
    optimizer = ka.AccumOptimizer("sgd", 3, on_nonfinite="skip_micro_batch")
    optimizer.build([weight, scale])
    step = in_mode(lambda g: optimizer.apply(g, [weight, scale]), mode)
    for slope, value in [(1.0, 2.0), (np.inf, 9.0), (2.0, 3.0)]:
        step([tf.constant([slope]), tf.constant([value])])
    # The largest of the two that were kept.
    assert_equal([scale], [np.array([3.0])])
    assert counters(optimizer) == (0, 1)


# --- skip_window


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_skipped_window_changes_nothing_and_the_next_one_is_clean(mode):
    run, oracle, control = Accumulating(mode, "skip_window"), Plain(), Plain()
    for seed, bad in enumerate([(), (FIRST,), (MIDDLE,), (LAST,), (FIRST, LAST), ()]):
        window = gradients(seed)
        held = [v.numpy() for v in run.variables], slots(run.optimizer)
        run.window(spoil(window, *bad))
        control.window(*without(window, *bad))
        if bad:
            assert_equal(run.variables, held[0], "weights")
            assert_equal(slots(run.optimizer), held[1], "slots")
        else:
            oracle.window(window)
            assert_same(run, oracle)
        assert run.skipped == ([0, 1, 2, 3, 4, 4][seed], 0)
        assert int(run.optimizer.micro_step) == 0
    assert_differ(run.variables, control.variables)


@pytest.mark.slow_but("skip_window")
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
def test_a_sum_that_overflows_itself_is_skipped(policy):
    run, oracle = Accumulating("graph", policy), Plain()
    run.window([[np.full_like(g, 3e38) for g in m] for m in gradients(1)])
    run.window(gradients(2))
    oracle.window(gradients(2))
    assert_same(run, oracle)
    assert run.skipped == (1, 0)


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
def test_a_flush_judges_the_open_window_too(policy):
    run, oracle, window = Accumulating("eager", policy), Plain(), gradients(1)
    for i in (FIRST, MIDDLE, 2):
        run.step(spoil(window, MIDDLE)[i], WEIGHTS[i])
    run.optimizer.flush()
    assert int(run.optimizer.micro_step) == 0
    if policy == "skip_window":
        assert_equal(run.variables, oracle.variables)
        assert run.skipped == (1, 0)
    else:
        oracle.window([window[FIRST], window[2]], [WEIGHTS[FIRST], WEIGHTS[2]])
        assert_same(run, oracle)
        assert_differ(run.variables, two_variables())
        assert run.skipped == (0, 1)


# --- propagate


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_by_default_a_nan_reaches_the_weights_as_in_keras(mode):
    assert ka.AccumOptimizer("sgd", 2).on_nonfinite == "propagate"
    run = Accumulating(mode, "propagate", sgd)
    for seed, bad in enumerate([FIRST, MIDDLE, LAST]):
        # From finite weights: what the window before has left in the sums would show.
        for v, start in zip(run.variables, two_variables(), strict=True):
            v.assign(start)
        oracle, control = Plain(sgd), Plain(sgd)
        run.window(spoil(gradients(seed), bad))
        oracle.window(spoil(gradients(seed), bad))
        control.window(gradients(seed))
        for a, b in zip(run.variables, oracle.variables, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)
        assert [np.isfinite(v.numpy()).all() for v in run.variables] == [True, False]
        assert all(np.isfinite(v.numpy()).all() for v in control.variables)
    assert run.skipped == (0, 0)
    assert int(run.optimizer.iterations) == 3


# --- raise


@pytest.mark.slow_in("first-graph", "last-eager", "middle-graph")
@without_xla
@pytest.mark.parametrize("bad", [FIRST, MIDDLE, LAST], ids=["first", "middle", "last"])
def test_raise_changes_nothing_and_the_window_goes_on(mode, bad):
    run, oracle = Accumulating(mode, "raise"), Plain()
    run.window(gradients(1))
    window = gradients(2)
    for i, micro_batch in enumerate(window):
        if i == bad:
            held, weights = state(run.optimizer), [v.numpy() for v in run.variables]
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                run.step(spoil(window, bad)[bad], WEIGHTS[i])
            assert RAISED in str(caught.value).replace("\\'", "'")
            assert_equal(state(run.optimizer), held, "state")
            assert_equal(run.variables, weights, "weights")
        before = state(run.optimizer)
        run.step(micro_batch, WEIGHTS[i])
        pairs = zip(state(run.optimizer), before, strict=True)
        assert any((a != b).any() for a, b in pairs), "a step that changes nothing"
    oracle.window(gradients(1))
    oracle.window(window)
    assert_same(run, oracle)


def test_raise_is_refused_in_what_xla_compiles():
    run = Accumulating("xla", "raise")
    held = state(run.optimizer)
    assert_refused(
        lambda: run.step(gradients(1)[0], 1.0),
        ValueError,
        "Received `on_nonfinite='raise'` in a function that XLA compiles, where nothing "
        "can be raised. Pass `jit_compile=False` to `model.compile`, or use "
        "'skip_window' or 'skip_micro_batch'.",
    )
    assert_equal(state(run.optimizer), held)
    assert_equal(run.variables, two_variables())


# --- the length of a window


@pytest.mark.parametrize("policy", ["propagate", "skip_micro_batch", "skip_window"])
def test_a_bad_micro_batch_does_not_lengthen_the_window(policy):
    a = variable(1.0, 2.0)
    optimizer = ka.AccumOptimizer("sgd", 3, on_nonfinite=policy)
    optimizer.build([a])
    steps = []
    for gradient in (1.0, np.nan, 2.0, 3.0):
        optimizer.apply([tf.constant([gradient, gradient])], [a])
        steps.append(int(optimizer.micro_step))
    assert steps == [1, 2, 0, 1]


def test_a_loss_scale_optimizer_around_kerass_own_accumulation_lengthens_the_window():
    a = variable(1.0, 2.0)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(gradient_accumulation_steps=3)
    )
    moved = []
    for gradient in (1.0, np.nan, 2.0, 3.0):
        optimizer.apply([tf.constant([gradient, gradient])], [a])
        moved.append(a.numpy()[0] != 1.0)
    assert moved == [False, False, False, True]


# --- other routes


@pytest.mark.slow_in("xla")
def test_sparse_gradients_are_judged_and_skipped_like_dense_ones(mode):
    table = keras.Variable(np.ones((4, 2), "float32"))
    optimizer = ka.AccumOptimizer(
        keras.optimizers.SGD(1.0), 3, on_nonfinite="skip_micro_batch"
    )
    optimizer.build([table])
    step = in_mode(
        lambda v, i, w: optimizer.apply(
            [tf.IndexedSlices(v, i, tf.constant([4, 2]))], [table], w
        ),
        mode,
    )
    rows = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, np.nan], [6.0, 7.0]], [[8.0, 9.0]] * 2]
    for values, weight in zip(rows, [1.0, 5.0, 3.0], strict=True):
        step(tf.constant(values), tf.constant([1, 1]), tf.constant(weight))
    mean = (np.array([4.0, 6.0]) + 3 * np.array([16.0, 18.0])) / 4
    expected = np.ones((4, 2))
    expected[1] -= mean
    assert_close([table], [expected])
    assert counters(optimizer) == (0, 1)


SIZES = [4, 3, 5, 2]


def fit_with_a_nan(mode, policy, bad):
    """Two epochs of a window each; in the first, one micro-batch holds a NaN."""
    x, y = data(2 * sum(SIZES))
    x[sum(SIZES[:bad]) : sum(SIZES[: bad + 1])][:1] = np.nan
    optimizer = ka.AccumOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), 4, on_nonfinite=policy
    )
    model = compile_in(dense_model(), mode, optimizer)
    model.fit(Batches(SIZES * 2, x, y), verbose=0, shuffle=False)
    return model


def train_on(*selections):
    """The plain large batch on selected samples, one update each."""
    x, y = data(2 * sum(SIZES))
    model = dense_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    for selected in selections:
        model.train_on_batch(x[selected], y[selected])
    return model


@pytest.mark.slow_in("1")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("mode", "policy", "bad"),
    [
        ("eager", "skip_window", 2),
        ("graph", "skip_micro_batch", 1),
        ("xla", "skip_micro_batch", 3),
    ],
)
def test_fit_goes_on_without_what_is_skipped(mode, policy, bad):
    model = fit_with_a_nan(mode, policy, bad)
    n = sum(SIZES)
    start = sum(SIZES[:bad])
    rest = [*range(start), *range(start + SIZES[bad], n)]
    first, second = [rest], [list(range(n, 2 * n))]
    whole = policy == "skip_window"
    oracle = train_on(*([] if whole else first), *second)
    control = train_on(*(first if whole else []), *second)
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(slots(model.optimizer), slots(oracle.optimizer))
    assert_differ(model.get_weights(), control.get_weights())
    assert counters(model.optimizer) == ((1, 0) if whole else (0, 1))


def test_fit_stops_at_a_nan_with_raise():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        fit_with_a_nan("graph", "raise", 1)
    assert RAISED in str(caught.value).replace("\\'", "'")


def test_fit_propagates_a_nan_by_default():
    model = fit_with_a_nan("graph", "propagate", 1)
    assert all(np.isnan(weights).all() for weights in model.get_weights()[:1])
    assert int(model.optimizer.iterations) == 2


# --- weight zero


@pytest.mark.parametrize(
    "policy", ["propagate", "skip_micro_batch", "skip_window", "raise"]
)
def test_a_nan_of_weight_zero_contributes_nothing_under_any_policy(policy):
    a = variable(1.0, 2.0)
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 3, on_nonfinite=policy)
    for gradient, weight in [(4.0, 2.0), (np.nan, 0.0), (1.0, 1.0)]:
        optimizer.apply([tf.constant([gradient, gradient])], [a], weight)
    assert_close([a], [np.array([-2.0, -1.0])])
    assert int(optimizer.skipped_windows) == 0


@pytest.mark.parametrize(
    "policy", ["propagate", "skip_micro_batch", "skip_window", "raise"]
)
def test_a_window_of_nans_of_weight_zero_updates_with_zero(policy):
    """As the large batch of the same samples does: its gradient is zero, not None."""
    a = variable(1.0, 2.0)
    sgd = keras.optimizers.SGD(1.0, weight_decay=0.1)
    optimizer = ka.AccumOptimizer(sgd, 2, on_nonfinite=policy)
    for _ in range(2):
        optimizer.apply([tf.constant([np.nan, np.nan])], [a], weight=0)
    assert_close([a], [np.array([0.9, 1.8])])
    assert int(optimizer.iterations) == 1


def test_an_unknown_policy_is_refused():
    assert_refused(
        lambda: ka.AccumOptimizer("sgd", 2, on_nonfinite="skip"),
        ValueError,
        "`on_nonfinite` must be one of 'propagate', 'skip_micro_batch', 'skip_window', "
        "'raise'. Received: 'skip'",
    )
