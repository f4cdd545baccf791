"""The vision tower's weights. They are loaded, checked and kept; nothing runs them yet."""

from flax import nnx

from dgemma_jax.config import Config, VisionConfig
from dgemma_jax.model.layers import MLP, RMSNorm, weight


class ClipBounds(nnx.Module):
    """Scalar clamps around one linear layer, of checkpoints with clipped linears."""

    def __init__(self, dtype: str):
        self.input_min = weight(dtype=dtype)
        self.input_max = weight(dtype=dtype)
        self.output_min = weight(dtype=dtype)
        self.output_max = weight(dtype=dtype)


class PatchEmbedder(nnx.Module):
    """Projection of flattened patches and the two-axis position table (x first)."""

    def __init__(self, vision: VisionConfig, dtype: str):
        self.input_proj = weight(3 * vision.patch_size**2, vision.hidden_size, dtype=dtype)
        self.position_table = weight(2, vision.position_embedding_size, vision.hidden_size, dtype=dtype)


class VisionAttention(nnx.Module):
    def __init__(self, vision: VisionConfig, dtype: str):
        M, N, K, H = vision.hidden_size, vision.num_attention_heads, vision.num_key_value_heads, vision.head_dim
        self.q = weight(M, N, H, dtype=dtype)
        self.k = weight(M, K, H, dtype=dtype)
        self.v = weight(M, K, H, dtype=dtype)
        self.o = weight(N, H, M, dtype=dtype)
        self.q_norm = RMSNorm(H, vision.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(H, vision.rms_norm_eps, dtype)
        if vision.use_clipped_linears:
            self.q_clip, self.k_clip = ClipBounds(dtype), ClipBounds(dtype)
            self.v_clip, self.o_clip = ClipBounds(dtype), ClipBounds(dtype)


class VisionMLP(MLP):
    def __init__(self, vision: VisionConfig, dtype: str):
        super().__init__(vision.hidden_size, vision.intermediate_size, dtype)
        if vision.use_clipped_linears:
            self.gate_clip, self.up_clip, self.down_clip = ClipBounds(dtype), ClipBounds(dtype), ClipBounds(dtype)


class VisionLayer(nnx.Module):
    def __init__(self, vision: VisionConfig, dtype: str):
        for name in ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"):
            setattr(self, name, RMSNorm(vision.hidden_size, vision.rms_norm_eps, dtype))
        self.attention = VisionAttention(vision, dtype)
        self.mlp = VisionMLP(vision, dtype)


class VisionTower(nnx.Module):
    """Patch embedder, encoder layers, standardisation and the projection into the text model's width."""

    def __init__(self, config: Config, vision: VisionConfig, dtype: str):
        self.patch_embedder = PatchEmbedder(vision, dtype)
        self.layers = nnx.List([VisionLayer(vision, dtype) for _ in range(vision.num_hidden_layers)])
        if vision.standardize:
            self.std_bias = weight(vision.hidden_size, dtype=dtype)
            self.std_scale = weight(vision.hidden_size, dtype=dtype)
        self.projection = weight(vision.hidden_size, config.hidden_size, dtype=dtype)
