"""Names of aten ops, grouped by their effect on data; `memopt.walk.aten.rules` has their effect on channel ids."""

from __future__ import annotations

from memopt.torch_compat.activations import OPERATIONS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Elements are moved, copied, repeated or dropped; none is changed.
MOVEMENT = _names(
    "view _unsafe_view reshape _reshape_alias t transpose permute expand slice select unsqueeze squeeze split "
    "split_with_sizes chunk unbind narrow index_select index gather roll flip repeat repeat_interleave clone "
    "contiguous detach alias lift_fresh unfold diagonal _to_copy movedim swapaxes take tile view_copy expand_copy "
    "unflatten flatten slice_copy squeeze_copy unsqueeze_copy _unsafe_index rot90 pixel_shuffle pixel_unshuffle "
    "channel_shuffle masked_select to type_as view_as narrow_copy unsafe_split unsafe_chunk split_copy "
    "split_with_sizes_copy select_copy"
)
SAME_ELEMENTS = {"_to_copy", "to", "type_as", "clone", "contiguous", "detach", "alias", "lift_fresh"}
RESHAPES = {"view", "_unsafe_view", "_reshape_alias", "reshape"}

#: Elements are moved and padded, with a constant or with copies of elements.
PADS = _names(
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d"
)
#: Ops that read a shape or dtype only.
NO_USE = _names(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full sym_size "
    "size is_same_size new_empty_strided sym_numel sym_stride stride numel _has_compatible_shallow_copy_type"
)
NONLINEARITIES = OPERATIONS.keys() | _names(
    "_softmax _log_softmax softmax pow rsqrt sqrt exp erf log sin cos clamp clamp_min clamp_max abs maximum minimum "
    "sign square reciprocal exp2 log1p round floor"
)
NORM_FUNCTIONS = _names(
    "native_layer_norm layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training cudnn_batch_norm batch_norm _batch_norm_with_update batch_norm_with_update "
    "_fused_rms_norm rms_norm"
)
STATISTICS = _names("linalg_vector_norm norm var_mean var std")
READS = _names(
    "_local_scalar_dense equal any all eq ne lt gt le ge isnan isinf isfinite nonzero is_nonzero argmax max min topk "
    "sort argsort item _assert_async isin unique2 _unique2 amax amin bucketize searchsorted"
)
SCATTERS = _names("masked_scatter index_put scatter slice_scatter select_scatter index_add scatter_add")
