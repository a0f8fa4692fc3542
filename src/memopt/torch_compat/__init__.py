"""Every private name of PyTorch that memopt uses, with its meaning and the loss without it.

PyTorch may rename or drop such a name in any release. So the import of this package looks up each name once
(:func:`memopt.torch_compat.lookup.find`). If a name is absent, a stand-in switches off exactly the mechanism that needs
it. :func:`missing` lists the absent names, and :func:`memopt.patch` warns of them once. ``tests/torch_compat`` checks
each name against its description and removes each in turn.

Where possible a name here *is* PyTorch's own function, so a call has no overhead. Import names at module level.

Not in this package, because PyTorch documents them or tests their compatibility: ``Tensor._version``, ``Tensor._base``;
the dictionaries ``_parameters``, ``_buffers`` and ``_modules`` of ``nn.Module``; ``name()``, ``metadata`` and
``next_functions`` of graph nodes; names of ATen operators that begin with an underscore (``aten._unsafe_view``).
"""

from memopt.torch_compat.autograd import (
    BATCH_NORMS,
    PADS,
    SAVED_FIELDS,
    at_the_end_of_backward,
    call_its_backward,
    current_graph_task_id,
    current_node,
    held,
    input_metadata,
    living_storage,
    next_sequence_number,
    run_backward,
    saved,
    saved_tensors_hooks_disabled,
    sequence_number,
    shows_saved,
    storage_id,
    storage_use_count,
    tensor_hooks,
    tensor_hooks_slot,
    tensor_uses,
    top_saved_tensors_hooks,
    unpack_hooks,
    weak_storage,
    without_foreign_hooks,
)
from memopt.torch_compat.compiling import eagerly, keep_result, partition_traced_graph
from memopt.torch_compat.dispatch import (
    DIRECT_APPLY,
    PLAIN_TYPES,
    DirectFunction,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    TracingMode,
    any_autocast_enabled,
    device_read,
    forward_mode_level,
    grouped_mm,
    interpreter_stack,
    is_legacy_batched,
    is_operator,
    is_traceable_wrapper_subclass,
    is_transformed,
    kernels_of_attention,
    known_values,
    makes_wrappers,
    no_dispatch,
    no_modes,
    no_torch_function,
    operator_name,
    operator_schema,
    proxy_mode,
    set_known_values,
    tracing_state,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
    view_below_autograd,
    wrapper,
)
from memopt.torch_compat.lookup import Missing, missing, names, warn_once_of_missing
from memopt.torch_compat.modules import (
    BATCH_NORM_CLASSES,
    calls_of_checkpointing,
    checkpointed_call,
    checkpointing_hook,
    compiled_module,
    fsdp_leaves_gathered,
    fsdp_takes_back,
    has_any_global_hook,
    hook_flags,
    is_checkpointed_region,
    is_dropout,
    is_module_call,
    is_replica,
    is_selectively_checkpointed,
    module_hooks,
    modules_that_run,
    no_forward_hooks,
    parametrizations_are_cached,
    replicating,
    stopping_unseen,
)
