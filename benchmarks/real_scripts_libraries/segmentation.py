"""A U-Net of segmentation-models-pytorch with Dice's loss and its metrics."""

import segmentation_models_pytorch as smp
import torch

model = smp.Unet("resnet34", encoder_weights=None, in_channels=3, classes=1).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
criterion = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
for _ in range(4):
    images, masks = torch.rand(8, 3, 256, 256), torch.randint(0, 2, (8, 1, 256, 256))
    output = model(images.cuda())
    loss = criterion(output, masks.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    counts = smp.metrics.get_stats((output.sigmoid() > 0.5).long(), masks.cuda(), mode="binary")
    print(smp.metrics.iou_score(*counts, reduction="micro"))
