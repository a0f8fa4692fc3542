"""LoRA on a diffusion transformer: a small SD3 of diffusers, new, learns to denoise pictures of one handwritten digit.

python examples/diffusion.py [--steps N]
"""

from __future__ import annotations

import torch
from data import show, steps
from diffusers import SD3Transformer2DModel
from peft import LoraConfig
from sklearn.datasets import load_digits

import memopt


def main(count: int) -> None:
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        patch_size=2,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        caption_projection_dim=128,
        joint_attention_dim=10,
        pooled_projection_dim=10,
        pos_embed_max_size=8,
    )
    memopt.patch(model)  # the one line; inputs are guessed from the signature
    model.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0", "net.2", "proj_out"]))
    digits, labels = load_digits(return_X_y=True)
    pictures = torch.tensor(digits[labels == 3], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    label = torch.eye(10)[3]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(count):
        clean = pictures[torch.randint(len(pictures), (16,))]
        noise, time = torch.randn_like(clean), torch.rand(16)
        mixed = clean.lerp(noise, time[:, None, None, None])
        velocity = model(mixed, label.expand(16, 1, 10), label.expand(16, 10), time * 1000).sample
        loss = (velocity - (noise - clean)).square().mean()  # flow matching
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    show(losses, memopt.summary(model))


if __name__ == "__main__":
    main(steps(100))
