"""Why tests that plain Keras passes fail through the package: of their names, why."""

PRIVATE = "reads or calls a private part of the optimizer, which is the inner one's"
LISTED = "counts the optimizer's variables, which are the window's too"
REASONS = (
    (r"adam_test.*test_ema", PRIVATE),
    (r"optimizer_test.*OptimizerTest::test_ema", PRIVATE),
    (r"muon_test.*(test_adamw|test_muon_single_step|test_should_use)", PRIVATE),
    (r"nadam_test.*test_build_with_empty_var_list", PRIVATE),
    (r"sgd_test.*test_single_step", LISTED),
    (r"optimizer_test.*test_setting_lr_to_callable_untracks_lr_var", LISTED),
    (r"learning_rate_schedule_test.*test_fit_lr_correctness", LISTED),
    (
        r"loss_scale_optimizer_test.*test_serialization",
        "counts the entries of the config, which has `accum_steps` and others too",
    ),
    (
        r"optimizer_sparse_test.*loss_scale_optimizer",
        "puts a LossScaleOptimizer around AccumOptimizer, which is refused: inside it is "
        "exact",
    ),
    (
        r"optimizer_test.*gradient_accumulation",
        "lets Keras accumulate in the inner optimizer, which is refused",
    ),
    (
        r"optimizer_test.*test_optimizer_auto_naming",
        "expects the name `adam`; it is `accum_optimizer`",
    ),
    (
        r"optimizer_test.*test_set_weights",
        "expects Keras's words where an optimizer is not built; the refusal has others",
    ),
    (
        r"schedule_free_adamw_test.*test_with_model",
        "trains a model without weights, where ScheduleFreeAdamW starts from zeros: "
        "refused",
    ),
    (
        r"trainer_test.*test_adds_loss_scaling_optimizer",
        "asserts the class of the optimizer, which is the one around",
    ),
    (
        r"trainer_test.*test_fit_sparse",
        "asserts that updates are sparse; the sum of a window is dense",
    ),
    (
        r"trainer_test.*(test_evaluate_with_custom_test_step|test_fit_with_custom_train_step"
        r"|test_retracing)",
        "trains a model with a `train_step` of its own, which the step refuses",
    ),
    (
        r"trainer_test.*test_loss_scaling_prevents_underflow",
        "has a model with an attribute `layers`, which `keras.Model` reserves",
    ),
)
