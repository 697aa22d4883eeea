"""A LightningModule with validation, a metric, and mixed precision."""

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10)

    def training_step(self, batch: list, index: int) -> torch.Tensor:
        images, labels = batch
        output = self.layers(images)
        loss = nn.functional.cross_entropy(output, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.accuracy(output, labels), prog_bar=True)
        return loss

    def validation_step(self, batch: list, index: int) -> None:
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(images), labels))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        }


samples = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
trainer = L.Trainer(
    max_epochs=1,
    accelerator="gpu",
    devices=1,
    precision="bf16-mixed",
    logger=False,
    gradient_clip_val=1.0,
)
trainer.fit(Classifier(), DataLoader(samples, batch_size=32), DataLoader(samples, batch_size=32))
