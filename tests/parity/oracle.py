"""transformers' DiffusionGemma as the reference: the passes of ``generate()``, run one at a time on one thread.

Arrays go in and come out as numpy. Masks and cache are the ones that ``generate()`` builds: plain ``forward()`` makes
others. Rows of unequal length are padded on the left here, as transformers needs.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checkpoints import VISION

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DynamicCache
    from transformers.models.gemma4.modeling_gemma4 import (
        create_masks_for_vision_model,
        get_block_sequence_ids_for_mask,
    )

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def left_pad(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask), both [B, longest], for rows of ids of unequal length."""
    width = max(map(len, rows))
    ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), bool)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = True
    return ids, mask


def image_inputs(images) -> dict[str, torch.Tensor]:
    """What transformers takes of an ImageBatch; nothing of None."""
    if images is None:
        return {}
    positions = np.asarray(images.positions, np.int64)
    return {"pixel_values": torch.from_numpy(images.patches), "image_position_ids": torch.from_numpy(positions)}


@dataclass
class Prefix:
    """A filled cache, and which of its positions are tokens."""

    cache: DynamicCache
    mask: torch.Tensor

    def layer(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one layer as [B, S, K, H]; a sliding layer holds the last W - 1 positions only."""
        layer = self.cache.layers[index]
        return tuple(np.moveaxis(x.numpy(), 1, 2) for x in (layer.keys, layer.values))


class Oracle:
    """One transformers model, loaded from a checkpoint directory in fp32."""

    def __init__(self, directory: Path):
        fields = json.loads((directory / "config.json").read_text())
        fields["vision_config"] = fields["vision_config"] or VISION  # null would build the tower of the release
        self.model = DiffusionGemmaForBlockDiffusion.from_pretrained(
            directory, config=DiffusionGemmaConfig.from_dict(fields), attn_implementation="sdpa", dtype=torch.float32,
            experts_implementation="eager",
        ).eval()  # fmt: skip
        self.config = self.model.config

    def save(self, directory: Path) -> Path:
        """Write the model as transformers does: ``per_layer_config`` in config.json, tied tensors once."""
        self.model.save_pretrained(directory)
        return directory

    @torch.no_grad()
    def features(self, images) -> list[np.ndarray]:
        """The soft tokens [count, D] of each image of an ImageBatch."""
        found = self.model.model.encoder.get_image_features(**image_inputs(images), return_dict=True).pooler_output
        return np.split(found.numpy(), np.cumsum(images.counts)[:-1])

    @torch.no_grad()
    def encode(
        self, ids: np.ndarray, mask: np.ndarray | None = None, prefix: Prefix | None = None, images=None,
        blocks: str = "all",
    ):  # fmt: skip
        """Causal pass over ``ids`` [B, T] behind ``prefix``: hidden states [B, T, D] and the longer prefix.

        The cache inside ``prefix`` is extended in place, as transformers does. ``images``: an ImageBatch. ``blocks``:
        where its tokens see each other, see Config.image_blocks; "sliding" takes the masks of transformers' Gemma 4.
        """
        tokens = torch.from_numpy(np.asarray(ids, np.int64))
        mask = torch.ones(tokens.shape, dtype=torch.bool) if mask is None else torch.from_numpy(mask)
        cache = DynamicCache(config=self.config.get_text_config(decoder=True)) if prefix is None else prefix.cache
        if prefix is not None:
            mask = torch.cat([prefix.mask, mask], 1)
        start = cache.get_seq_length()
        positions = torch.arange(start, start + tokens.shape[1], dtype=torch.int32)[None]
        types = None if images is None or blocks == "none" else (tokens == self.config.image_token_id).long()
        shared = {
            "inputs_embeds": torch.empty((*tokens.shape, 0)), "attention_mask": mask, "cache": cache,
            "position_ids": positions,
        }  # fmt: skip
        if blocks == "sliding":
            ids_of_blocks = get_block_sequence_ids_for_mask(types, device="cpu")
            text = self.config.get_text_config(decoder=True)
            masks = create_masks_for_vision_model(config=text, block_sequence_ids=ids_of_blocks, **shared)
        else:
            masks = self.model.model.encoder.create_masks_for_generate(
                config=self.config, mm_token_type_ids=types, **shared
            )
        out = self.model.model.encoder(
            input_ids=tokens, attention_mask=masks, cache=cache, position_ids=positions, **image_inputs(images)
        )
        return out.last_hidden_state.numpy(), Prefix(cache, mask)

    @torch.no_grad()
    def logits(self, canvas: np.ndarray, prefix: Prefix, conditioning: np.ndarray | None = None) -> np.ndarray:
        """Soft-capped logits [B, C, V] of a denoising pass; ``conditioning`` is an earlier pass's logits over T."""
        tokens = torch.from_numpy(np.asarray(canvas, np.int64))
        start = prefix.cache.get_seq_length()
        masks = self.model.model.decoder.create_diffusion_decoder_attention_mask(
            config=self.config, inputs_embeds=torch.empty((*tokens.shape, 0)), cache=prefix.cache,
            decoder_attention_mask=torch.nn.functional.pad(prefix.mask, (0, tokens.shape[1]), value=True),
        )  # fmt: skip
        return self.model(
            decoder_input_ids=tokens,
            cache=prefix.cache,
            decoder_attention_mask=masks,
            decoder_position_ids=torch.arange(start, start + tokens.shape[1], dtype=torch.int32)[None],
            self_conditioning_logits=None if conditioning is None else torch.from_numpy(conditioning),
        ).logits.numpy()
