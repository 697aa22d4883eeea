"""Answers "will it fit?" for a model's name and a fine-tuning method, without torch.

:mod:`~gpumemnet.named.catalogue` finds the configuration of a model,
:mod:`~gpumemnet.named.architectures` turns it into a network of
:mod:`~gpumemnet.named.blocks` by what ``architectures.json`` says of each family,
:mod:`~gpumemnet.named.methods` says what is trained and in which number formats,
:mod:`~gpumemnet.named.block_walk` walks through one block,
:mod:`~gpumemnet.named.step_walk` finds the peak of a training step, and
:mod:`~gpumemnet.named.fit` puts the answer together.
"""
