"""Memory checks for the trainers of ``transformers`` and Lightning: whether a run fits its GPU,
before its first step, and what it really used, afterwards.

::

    from gpumemnet.trainer_callbacks import MemoryCheckCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCheckCallback()])

A causal language model is asked by the rules of ``gpumemnet fit``, which takes no time, if they
count the parameters that the model has; any other module is traced with the run's first batch.
What cannot be checked is said, and the training goes on.  ``transformers``, Lightning and torch are
loaded where a class is first used.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.client import URL_VARIABLE, Client
from gpumemnet.errors import GpumemnetError, InvalidRequestError, JobDoesNotFitError
from gpumemnet.gpu import NO, VERDICT_TEXTS, YES, DeviceProfile, find_profile, verdict
from gpumemnet.job.layers import check_choice
from gpumemnet.named.catalogue import NamedModel
from gpumemnet.named.fit import FitAnswer, fit
from gpumemnet.site.observations import Observation, observation_to_dict
from gpumemnet.units import MIB, ceil_mib, format_bytes

if TYPE_CHECKING:
    from torch import nn

    from gpumemnet.job.training_job import TrainingJob
    from gpumemnet.tracing.result import TraceAnswer

ON_MISFIT: Final = ("stop", "warn")
_DEFAULT_GPU: Final = "A100-80GB"
_TIMEOUT_SECONDS: Final = 10.0
_TOLERANCE: Final = 0.01
"""How far the parameters that the rules count may lie from those that the model has."""
_OPTIMIZERS: Final = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
}
"""``TrainingArguments.optim`` → the optimizer's name here, where they differ."""
_PRECISIONS: Final = {
    "bf16-mixed": "amp_bf16",
    "16-mixed": "amp_fp16",
    "bf16-true": "bf16",
    "16-true": "bf16",  # of the same size
}
"""Lightning's precision → ours."""
_ATTENTION: Final = {"eager": "math", "flash_attention_2": "flash"}


@dataclass(frozen=True)
class GpuAtHand:
    """The GPU that this process trains on.

    Attributes:
        name: as the driver calls it.
        available_bytes: what is free, and what this process holds already.
        peak_bytes: the most that this process has held, as NVML counts it; ``None`` where the
            driver does not tell.
    """

    name: str
    available_bytes: int
    peak_bytes: int | None


def gpu_at_hand() -> GpuAtHand | None:
    """The current CUDA device; ``None`` on a machine without."""
    import torch

    if not torch.cuda.is_available():
        return None
    name, reserved = torch.cuda.get_device_name(), torch.cuda.memory_reserved()
    free, _ = torch.cuda.mem_get_info()
    held = _process_bytes(f"GPU-{torch.cuda.get_device_properties().uuid}")
    if held is None:
        return GpuAtHand(name, free + reserved, None)
    return GpuAtHand(name, free + held, held - reserved + torch.cuda.max_memory_reserved())


def _process_bytes(uuid: str) -> int | None:
    """What this process holds on a GPU, as NVML tells it."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError:
        return None
    # In a container the driver lists the host's process ids.
    own = [each for each in processes if each.pid == os.getpid()] or processes
    return own[0].usedGpuMemory if len(own) == 1 else None


class MemoryCheck:
    """What both callbacks share.

    Args:
        on_misfit: what to do if the expected bytes exceed what is free: ``stop`` raises a
            :class:`~gpumemnet.errors.JobDoesNotFitError` before the first step, ``warn`` says it.
        gpu: the GPU to ask for, by a name of the catalogue or the path of a profile; the one at
            hand by default.
        sequence_length: tokens of the longest sample of a language model; those of the first batch
            by default.
        observations: JSON Lines file to which a finished run is appended, for ``gpumemnet
            calibrate``; without it, the run is reported to the service at ``GPUMEMNET_URL``, if
            that is set.

    Attributes:
        answer: what the run is expected to take, once that is known.
        job: the run's job, if what it used is to be reported.
    """

    def __init__(
        self,
        on_misfit: str = ON_MISFIT[0],
        *,
        gpu: str | None = None,
        sequence_length: int | None = None,
        observations: str | Path | None = None,
    ) -> None:
        check_choice(on_misfit, ON_MISFIT, "on_misfit")
        super().__init__()
        self.on_misfit, self.gpu = on_misfit, gpu
        self.sequence_length, self.observations = sequence_length, observations
        self.answer: FitAnswer | TraceAnswer | None = None
        self.job: TrainingJob | None = None

    def check(
        self,
        model: nn.Module,
        inputs: object,
        options: Mapping[str, Any],
        by_name: Callable[[DeviceProfile], FitAnswer | None] = lambda profile: None,
    ) -> None:
        """Compares what a run is expected to take with what is free.

        Args:
            model, inputs, options: as in :func:`gpumemnet.trace`; the optimizer is an object.
            by_name: answers by the rules of ``fit`` where they hold, else gives ``None``.

        Raises:
            JobDoesNotFitError: the expected bytes exceed the free ones, and ``on_misfit`` is
                ``stop``.
        """
        from gpumemnet.tracing.api import trace

        device = gpu_at_hand()
        try:
            profile = find_profile(self.gpu or (device.name if device else _DEFAULT_GPU))
            self.answer = by_name(profile) or trace(model, inputs, gpu=profile, **options)
        except GpumemnetError as error:
            return _say(f"the memory of this run is not checked: {error}")
        expected, safe = self.answer.expected_bytes, self.answer.safe_bytes
        takes = f"this run takes {format_bytes(expected)} on {profile.name}, at most {format_bytes(safe)}"
        if device is None:
            return _say(f"{takes}; no GPU is at hand to compare with")
        judged = verdict(ceil_mib(expected), ceil_mib(safe), device.available_bytes // MIB)
        sentence = f"{takes}, and {format_bytes(device.available_bytes)} are free"
        if judged == NO and self.on_misfit == "stop":
            remedy = "use a smaller batch, shorter samples, checkpointing or LoRA"
            raise JobDoesNotFitError(f"{sentence}: {remedy}, or pass on_misfit='warn'")
        _say(sentence if judged == YES else f"{sentence}: it {VERDICT_TEXTS[judged]}")
        if self.observations is not None or URL_VARIABLE in os.environ:
            self._extract(model, inputs, {**options, "gpu": profile.name})
        return None

    def _extract(self, model: nn.Module, inputs: object, options: dict[str, Any]) -> None:
        """Keeps the job that an observation belongs to."""
        from gpumemnet.extract.extraction import ExtractOptions, extract_job

        optimizer = options["optimizer"]
        momentum = "_momentum" if optimizer.defaults.get("momentum") else ""
        options["optimizer"] = f"{type(optimizer).__name__.lower()}{momentum}"
        known = {each.name for each in fields(ExtractOptions)}
        stated = {name: value for name, value in options.items() if name in known}
        try:
            self.job = extract_job(model, inputs, ExtractOptions(**stated)).job
        except GpumemnetError as error:
            _say(f"what this run uses will not be reported: {error}")

    def report(self) -> None:
        """Reports what the run really used, as an observation."""
        device = gpu_at_hand()
        if device is None or self.job is None:
            return None
        if device.peak_bytes is None:
            return _say("NVML does not tell what this process used: nothing is reported")
        run: dict[str, Any] = {
            "job": self.job,
            "gpu": device.name,
            "source": "nvml_process",
            "peak_bytes": device.peak_bytes,
            "observed_at": datetime.now(UTC),
        }
        try:
            if self.observations is None:
                with Client(timeout_seconds=_TIMEOUT_SECONDS) as client:
                    client.observe(**run)
            else:
                line = json.dumps(observation_to_dict(Observation(**run)))
                with Path(self.observations).open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
        except (GpumemnetError, OSError) as error:
            return _say(f"what this run used is not reported: {error}")
        return _say(f"this run used {format_bytes(device.peak_bytes)}, which is reported")


def _say(sentence: str) -> None:
    """Writes one line, once for all processes of a run."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"gpumemnet: {sentence}\n")


@cache
def _hf_callback() -> type:
    from transformers import TrainerCallback

    class MemoryCheckCallback(MemoryCheck, TrainerCallback):  # type: ignore[misc]
        """The memory check of a ``transformers`` Trainer; arguments of :class:`MemoryCheck`."""

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **given: Any
        ) -> None:
            """Waits for the first batch, whose lengths nobody knows earlier."""
            optimizer = getattr(given.get("optimizer"), "optimizer", given.get("optimizer"))
            self._hook = model.register_forward_pre_hook(
                partial(self._before_first_step, args, optimizer), with_kwargs=True
            )

        def on_train_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **given: Any
        ) -> None:
            """Reports what was used."""
            self._hook.remove()
            self.report()

        def _before_first_step(
            self, args: Any, optimizer: Any, model: Any, positional: Any, inputs: dict[str, Any]
        ) -> None:
            if not model.training:  # an evaluation before the training
                return
            self._hook.remove()
            options = {
                "optimizer": optimizer,
                "precision": _precision(model, args),
                "gradient_accumulation": args.gradient_accumulation_steps,
                "clip_norm": args.max_grad_norm or None,
                "zero_grad": "after_step",
                "parallel": "ddp" if args.world_size > 1 else "none",
                "ranks": args.world_size,
            }
            by_name = partial(_fit_by_name, model, args, inputs, self.sequence_length)
            self.check(model, inputs or positional, options, by_name)

    return MemoryCheckCallback


def _precision(model: Any, args: Any) -> str:
    if next(each for each in model.parameters() if each.is_floating_point()).element_size() == 2:
        return "bf16"
    return "amp_bf16" if args.bf16 else "amp_fp16" if args.fp16 else "fp32"


def _fit_by_name(
    model: Any, args: Any, inputs: Mapping[str, Any], tokens: int | None, profile: DeviceProfile
) -> FitAnswer | None:
    """The answer of ``fit``; ``None`` where its rules do not describe this model or run."""
    adapters = list(getattr(model, "peft_config", {}).values())
    base = model.get_base_model() if adapters else model
    is_sharded = bool(args.fsdp or args.deepspeed)
    if not type(base).__name__.endswith("ForCausalLM") and not is_sharded:
        return None
    batch, longest = inputs["input_ids"].shape
    is_4bit = getattr(base, "is_loaded_in_4bit", False)
    method: dict[str, Any] = {
        "method": "full",
        "batch_size": batch,
        "sequence_length": tokens or longest,
        "gradient_accumulation": args.gradient_accumulation_steps,
        "optimizer": _OPTIMIZERS.get(args.optim, args.optim),
        "implementation": "fused" if args.optim.endswith("fused") else "default",
        "precision": _precision(model, args),
        "has_autocast": args.bf16 or args.fp16,
        "checkpointing": any(getattr(each, "gradient_checkpointing", 0) for each in base.modules()),
        "kernels": "liger" if args.use_liger_kernel else "none",
        "attention": _ATTENTION.get(base.config._attn_implementation),
        "gpus": args.world_size,
        "parallel": "fsdp2" if args.fsdp else "zero3" if args.deepspeed else "ddp",
    }
    if adapters:
        targets = adapters[0].target_modules
        names = targets if isinstance(targets, str) else ",".join(sorted(targets))
        quantised = "qlora" if is_4bit else "lora"
        method |= {
            "method": "dora" if getattr(adapters[0], "use_dora", False) else quantised,
            "quantisation": "nf4" if is_4bit else "",
            "lora_rank": adapters[0].r,
            "lora_target": names,
            "lora_dropout": adapters[0].lora_dropout,
        }
    config = {**base.config.to_dict(), "architectures": [type(base).__name__]}
    named = NamedModel(type(base).__name__, config, "the model's configuration")
    try:
        answer = fit(named, gpu=profile, **method)
    except InvalidRequestError:  # a family or a value that the rules do not know
        if is_sharded:  # which no trace describes from inside of the run
            raise
        return None
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    if is_sharded or math.isclose(answer.trained_parameters, trained, rel_tol=_TOLERANCE):
        return answer
    return None


@cache
def _lightning_callback() -> type:
    from lightning.pytorch import Callback
    from torch import nn

    class TrainingStep(nn.Module):
        """A LightningModule that is called with the parts of a batch."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, *parts: Any, **named: Any) -> Any:
            batch = named or (parts if len(parts) > 1 else parts[0])
            output = self.module.training_step(batch, 0)
            return output["loss"] if isinstance(output, Mapping) else output

    class LightningMemoryCheck(MemoryCheck, Callback):  # type: ignore[misc]
        """The memory check of a Lightning Trainer; arguments of :class:`MemoryCheck`.

        The module's ``training_step`` runs on tensors without values; what it logs then is dropped.
        """

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            """Checks before the first step."""
            if trainer.global_step or batch_idx:
                return
            options = {
                "optimizer": trainer.optimizers[0],
                "precision": _PRECISIONS.get(trainer.precision, "fp32"),
                "gradient_accumulation": trainer.accumulate_grad_batches,
                "loss": lambda loss: loss,
            }
            pl_module.log = lambda *given, **named: None
            try:
                self.check(TrainingStep(pl_module), batch, options)
            finally:
                del pl_module.log

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Reports what was used."""
            self.report()

    return LightningMemoryCheck


def __getattr__(name: str) -> Any:
    if name == "MemoryCheckCallback":
        return _hf_callback()
    if name == "LightningMemoryCheck":
        return _lightning_callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
