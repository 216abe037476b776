"""Slow, plain answers in NumPy, which share no code with the package or with Keras."""

import numpy as np


def weighted_mean(gradients, weights):
    """The gradient of a window: sum of weight times gradient over the sum of weights."""
    total = sum(np.float64(w) for w in weights)
    return [
        sum(np.float64(w) * np.asarray(g, "float64") for w, g in zip(weights, column))
        / total
        for column in zip(*gradients, strict=True)
    ]


def sgd(variables, gradients, rate, velocities=None, momentum=0.0):
    """One step of gradient descent with momentum; returns variables and velocities."""
    velocities = velocities or [np.zeros_like(v) for v in variables]
    velocities = [momentum * m - rate * g for m, g in zip(velocities, gradients)]
    return [v + m for v, m in zip(variables, velocities)], velocities


def adam(variables, gradients, rate, state=None, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    """One step of Adam (Kingma and Ba, 2015) as Keras places epsilon."""
    step, first, second = state or (0, *[[np.zeros_like(v) for v in variables]] * 2)
    step += 1
    first = [beta_1 * m + (1 - beta_1) * g for m, g in zip(first, gradients)]
    second = [beta_2 * s + (1 - beta_2) * g**2 for s, g in zip(second, gradients)]
    alpha = rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    moved = [
        v - alpha * m / (np.sqrt(s) + epsilon)
        for v, m, s in zip(variables, first, second)
    ]
    return moved, (step, first, second)


def clip_units(gradient, weight, factor, minimal=1e-3):
    """Adaptive gradient clipping of one kernel, unit by unit (Brock et al. 2021)."""
    clipped = np.array(gradient, "float64")
    units = np.ndindex(gradient.shape[-1:]) if gradient.ndim > 1 else [()]
    for unit in units:
        index = (..., *unit)
        limit = factor * max(np.linalg.norm(np.ravel(weight[index])), minimal)
        norm = np.linalg.norm(np.ravel(gradient[index]))
        if norm > limit:
            clipped[index] = gradient[index] * limit / norm
    return clipped
