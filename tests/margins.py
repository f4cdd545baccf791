"""How far the decisions of a denoising step lay from coming out differently, from its logits in float64.

Two programs that add in another order differ by rounding, so they may decide differently where a margin is tiny; where
it exceeds MARGIN, a difference is a fault.
"""

import numpy as np

MARGIN = 1e-5


def margins(
    logits: np.ndarray, accepted: np.ndarray, bound: np.ndarray, confidence: np.ndarray | None, proposal: np.ndarray
) -> dict[str, np.ndarray]:
    """By decision: argmax [B,C] (relative), acceptance, order and confidence [B] (nats), proposal [B,C] (mass).

    logits [B,C,V]: tempered and masked, float64. accepted [B,C]: what the step accepted, with bound [B] or (). order:
    the least sure accepted position against the surest other one. confidence [B] or (): of the mean entropy. proposal
    [B,C]: margins of the draws, which count only where they were accepted.
    """
    top = np.partition(logits, -2, -1)[..., -2:]
    scale = np.abs(logits[np.isfinite(logits)]).max()
    entropy = entropies(logits)
    order = np.sort(entropy, -1)
    border = np.abs(np.cumsum(order, -1) - order - np.asarray(bound)[..., None])[:, 1:]
    kept = np.where(accepted, entropy, -np.inf).max(-1)
    lost = np.where(accepted, np.inf, entropy).min(-1)
    found = {
        "argmax": (top[..., 1] - top[..., 0]) / scale,
        "acceptance": border.min(-1),
        "order": lost - kept,
        "proposal": np.where(accepted, proposal, np.inf),
    }
    if confidence is not None:
        found["confidence"] = np.abs(entropy.mean(-1) - confidence)
    return found


def entropies(logits: np.ndarray) -> np.ndarray:
    """[B,C] in nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -(np.exp(logs) * np.where(np.isfinite(logs), logs, 0)).sum(-1)
