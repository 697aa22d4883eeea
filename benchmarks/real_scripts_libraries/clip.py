"""CLIP of open_clip or transformers with the contrastive loss."""

import sys

import torch

if sys.argv[1] == "open_clip":
    import open_clip

    model, _, _ = open_clip.create_model_and_transforms("RN50", pretrained=None)
    model = model.cuda()
    criterion = open_clip.ClipLoss()

    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return criterion(*model(images, texts))
else:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig()).cuda()

    def loss_of(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return model(input_ids=texts, pixel_values=images, return_loss=True).loss


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in range(5):
    images, texts = torch.rand(8, 3, 224, 224), torch.randint(1, 40_000, (8, 77))
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_of(images.cuda(non_blocking=True), texts.cuda(non_blocking=True))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
