"""Answers whether fine-tuning a named model fits a GPU, what its memory is made of, and what would
fit.

The answer is *instant*: from the blocks of the model, by the rules of
:mod:`gpumemnet.named.step_walk`, without torch.  Or it is *exact*: :mod:`gpumemnet.named.exact`
traces the real model, and what is said of other jobs is scaled to that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from operator import or_
from typing import Any, Final

from gpumemnet.atomic_files import Document, shipped_json
from gpumemnet.errors import ExtractError, FieldError, InvalidRequestError
from gpumemnet.gpu import (
    YES,
    DeviceProfile,
    available_mib,
    context,
    device_profile,
    device_profiles,
    find_profile,
    verdict,
)
from gpumemnet.named.architectures import extracted_network, network
from gpumemnet.named.catalogue import UNCHECKED, NamedModel, find_model
from gpumemnet.named.methods import (
    DIFFUSERS_TARGETS,
    FUSED_EXPERTS_SINCE,
    MAX_SEQUENCE_LENGTH,
    SEQUENCE_LENGTH,
    SHARDED,
    Fields,
    Method,
)
from gpumemnet.named.operators import Network
from gpumemnet.named.step_walk import ProcessPeak, Step, StepPeak
from gpumemnet.named.trainer_files import adapter_fields, read_trainer_file
from gpumemnet.physics.attention_kernels import (
    FLASH,
    AttentionCall,
    AttentionSetup,
    choose_kernel,
    obstacle,
)
from gpumemnet.physics.element_types import AUTOCAST_TYPES, HALF_BYTES, MODEL_TYPES
from gpumemnet.units import GIB, MIB, ceil_mib

Progress = Callable[[str], None]
"""Called with a few words at each stage of a trace."""
COVERAGE: Final = 0.98
"""Share of the published readings that lie below the safe bytes."""
TABLE_METHODS: Final = ("full", "lora", "qlora")
TABLE_LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192)
TABLE_BATCHES: Final = (16, 64, 128, 256)
TABLE_RESOLUTIONS: Final = (512, 768, 1024)
_VISION: Final = ("vit", "dinov2")
MAX_SEARCHED_BATCH: Final = 2**16
_SHOWN_CHANGES: Final = 3
_SHORT: Final = 512
"""Tokens of a sample that is not offered in half."""
_SCALED: Final = "table, limits and changes are those of the instant depth, scaled to this trace"
_MOST_GPUS: Final = 64
_NODE_GPUS: Final = 8
"""More are not offered."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a job fit.

    Attributes:
        text: what to do, and what it costs.
        options: the command's options that do it.
        expected_bytes, safe_bytes: of the changed job.
    """

    text: str
    options: str
    expected_bytes: int
    safe_bytes: int


@dataclass(frozen=True, slots=True)
class FitAnswer:
    """Whether a fine-tuning job fits.

    Attributes:
        model: the model's name; ``source`` says where its sizes come from, ``checked`` whether
            their total of ``parameters`` was compared with a published one.
        trained_parameters: elements that receive gradients.
        method: how it is trained, with every default.
        gpu, available_bytes: the GPU asked for, and what a process can use of it; ``None`` without.
        verdict: ``yes``, ``unsure``, ``no``, or ``None`` where no GPU was named.
        expected_bytes, safe_bytes: of the process on one GPU, CUDA context included.
        parts: what the expected bytes are made of; they add up.
        moment: when the peak is.
        blocks: how many blocks of which kind the model has.
        attention: the kernel of the attention, and why PyTorch does not run a faster one.
        table: for each method and checkpointing, the safe bytes at each sequence length, or batch
            size where there are no tokens; ``table_by`` names which.
        largest_batch, longest_sequence: that are safe on this GPU, all else equal; 0 if none is.
        smallest_gpu: of the catalogue that holds this job; ``None`` if none does.
        fewest_gpus: of the asked kind that hold it when sharded; ``None`` if 64 do not.
        changes: up to three that make it fit, in the order of their costs.
        notes: what was assumed.
        coverage: share of published readings of such jobs that lie below the safe bytes.
        depth: ``instant`` or ``exact``.
    """

    model: str
    source: str
    checked: str
    parameters: int
    trained_parameters: int
    method: Method
    gpu: str | None
    available_bytes: int | None
    verdict: str | None
    expected_bytes: int
    safe_bytes: int
    parts: Mapping[str, int]
    moment: str
    blocks: tuple[tuple[int, str], ...]
    attention: str
    table: tuple[Mapping[str, Any], ...]
    table_by: str
    largest_batch: int | None
    longest_sequence: int | None
    smallest_gpu: str | None
    fewest_gpus: int | None
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    coverage: float = COVERAGE
    depth: str = "instant"

    @property
    def fits(self) -> bool:
        """Whether the job is safe on the GPU; also true where no GPU was named."""
        return self.verdict in (None, YES)

    def document(self) -> Document:
        """The answer as a JSON object."""
        return asdict(self) | {"fits": self.fits}


@dataclass
class _Asked:
    """The question, and the memory of jobs like it.

    Attributes:
        model, profile: what is asked; another GPU's context and attention kernel may be others.
        networks, peaks: what was computed.
        scale: how far a trace lies above the instant depth.
        traced: the traced job, and its safe bytes above the context over the expected ones.
    """

    model: NamedModel
    profile: DeviceProfile | None
    networks: dict[tuple[int, bool, int], Network] = field(default_factory=dict)
    peaks: dict[tuple[Method, int], StepPeak] = field(default_factory=dict)
    scale: float = 1.0
    traced: tuple[Method, float] | None = None

    def __post_init__(self) -> None:
        self.assumed = self.profile or device_profile("A100-80GB")
        self.context = context(self.assumed)

    @property
    def kind(self) -> str:
        """Its family."""
        return str(self.model.config.get("model_type"))

    @property
    def reads_tokens(self) -> bool:
        """Whether a sample is a sequence of tokens, not an image."""
        extracted = self.model.extracted
        return self.kind not in _VISION if extracted is None else extracted["unit"] == "tokens"

    def has_blocks(self, method: Method) -> bool:
        """Whether the model has blocks that can be recomputed."""
        return any(section.is_checkpointed for section in self.network(method).sections)

    def recomputes(self, method: Method) -> bool:
        """Whether its library can do that."""
        return self.has_blocks(method) and self.network(method).recomputes

    def network(self, method: Method) -> Network:
        """The model at the size of a method's samples."""
        extracted = self.model.extracted
        size = method.sequence_length if self.reads_tokens else method.resolution or 0
        key = size, method.library == "litgpt", method.year
        config = self.model.config
        if method.year >= FUSED_EXPERTS_SINCE and config.get("transformers_5_ties_lm_head"):
            config = {**config, "tie_word_embeddings": True}
        if key not in self.networks:
            self.networks[key] = (
                network(config, size, is_joined=key[1])
                if extracted is None
                else extracted_network(extracted, size)
            )
        return self.networks[key]

    def peak(self, method: Method) -> StepPeak:
        """The peak of a training step."""
        if method.attention is None:
            method = replace(method, attention=self.kernel(method)[0] or None)
        key = method, self.assumed.blas_workspace_bytes
        if key not in self.peaks:
            self.peaks[key] = Step(self.network(method), *key).peak()
        return self.peaks[key]

    def expected(self, method: Method) -> int:
        """Expected bytes of the process."""
        reserved = self.peak(method).reserved_bytes
        return round(reserved * self.scale) + self.context.expected_bytes

    def safe(self, method: Method) -> int:
        """Safe bytes of the process."""
        above_context = self.expected(method) - self.context.expected_bytes
        return round(above_context * self._factor(method)) + self.context.bound_bytes

    def _factor(self, method: Method) -> float:
        """How far above the expectation readings of such jobs lie: the readings are of language
        models on one GPU; other jobs get the widest factor.

        ``python -m research readings --write`` makes the factors.
        """
        factors: dict[str, float] = shipped_json("named/safety.json")
        if self.traced is not None and self.traced[0] == method:
            return self.traced[1]
        if self.reads_tokens and method.gpus == 1 and method.quantisation != "gptq":
            return factors["plain"]
        return max(factors.values())

    def trace(
        self, method: Method, notes: list[str], progress: Progress | None
    ) -> ProcessPeak | None:
        """The traced peak, to which all further answers are scaled; ``None`` where the job cannot be
        traced, and a note says so."""
        from gpumemnet.named.exact import exact_peak

        try:
            traced = exact_peak(self.model, method, self.assumed, progress)
        except (ExtractError, InvalidRequestError) as error:
            notes.append(f"not traced, so this is the instant depth's answer: {error}")
            return None
        above = traced.expected_bytes - self.context.expected_bytes
        self.scale = above / self.peak(method).reserved_bytes
        factor = (traced.safe_bytes - self.context.bound_bytes) / above
        if method.is_quantised:  # versions of bitsandbytes keep more, see docs/how-to/fit.md
            factor = max(factor, self._factor(method))
        self.traced = method, factor
        notes += [*traced.notes, _SCALED]
        return replace(traced, safe_bytes=self.safe(method))

    def is_safe(self, method: Method, /, **changes: Any) -> bool:
        """Whether the safe bytes of the changed method are available on the GPU."""
        safe_bytes = self.safe(replace(method, **changes))
        return self.profile is None or ceil_mib(safe_bytes) <= available_mib(self.profile)

    def kernel(self, method: Method) -> tuple[str, str]:
        """The kernel that PyTorch runs for the model's attention, and why not flash."""
        call = _attention_call(self.network(method), method)
        if call is None:
            return "", ""
        setup = AttentionSetup(compute_capability=self.assumed.compute_capability)
        kernel = method.attention or choose_kernel(call, setup) or "math"
        reason = obstacle(FLASH, call, setup) if kernel in ("math", "memory_efficient") else None
        return kernel, reason or ""


def _attention_call(built: Network, method: Method) -> AttentionCall | None:
    """What the first attention of a network asks of PyTorch."""
    for section in built.sections:
        for operator in section.operators:
            if operator.kind == "attention":
                width, heads = operator.width, operator.heads
                positions = operator.rows or operator.elements // (heads * width) or 1
                keys = section.operators[operator.inputs[1]].elements
                groups = min(heads, keys // (positions * width) or 1)  # a joined layer gives more
                return AttentionCall(
                    query=(method.batch_size, heads, positions, width),
                    key=(method.batch_size, groups, positions, width),
                    value=(
                        *(method.batch_size, groups, positions),
                        operator.elements // (heads * positions),
                    ),
                    dtype=(AUTOCAST_TYPES | MODEL_TYPES).get(method.precision, "float32"),
                    is_causal=built.is_causal,
                    enable_gqa=groups != heads,
                )
    return None


def fit(
    model: str | NamedModel | Mapping[str, Any],
    *,
    gpu: str | DeviceProfile | None = None,
    base_model: str | None = None,
    exact: bool = False,
    progress: Progress | None = None,
    **method: Any,
) -> FitAnswer:
    """Answers whether fine-tuning a named model fits a GPU.

    Args:
        model: a hub id, a local folder, the path of a ``config.json`` or of a trainer's file; or
            the model itself, or a mapping with the keys of a trainer's file.
        gpu: a GPU of the catalogue; ``8xH100`` means eight of them, sharded by FSDP2 unless
            ``parallel`` says otherwise.
        base_model: the model to train, where a trainer's file names none or another.
        exact: whether to trace the real model, with its libraries; it takes seconds.  What cannot
            be traced has the instant depth's answer, with a note.
        progress: called with a few words at each stage of a trace.
        **method: fields of :class:`~gpumemnet.named.methods.Method`; they override a file.
            ``method`` may also be a configuration of ``peft``, or its ``adapter_config.json``.

    Raises:
        InvalidRequestError: the model or the GPU is not known, or an option has a wrong value.
        MissingExtraError: a package that the exact depth needs is not installed.
    """
    known = {each.name for each in fields(Method)}
    for name in method:
        if name not in known:
            raise InvalidRequestError(f"is no option: known are {', '.join(sorted(known))}", name)
    adapter: Any = method.get("method")
    if isinstance(adapter, Mapping) or str(adapter).endswith(".json"):
        method |= adapter_fields(adapter)
    profile, counted, notes = _asked_gpu(gpu)
    stated: Fields = {"parallel": "fsdp2"} if counted else {}
    if not isinstance(model, NamedModel):
        file = read_trainer_file(model)
        if file is not None:
            stated |= file.method
            if "precision" in method:  # overrides the type in which the file loads a base
                stated.pop("frozen_bytes", None)
            notes += file.notes(counted.get("gpus"))
            base_model = base_model or file.model
            if base_model is None:
                raise InvalidRequestError("is needed: the file names no model", "base_model")
        model = find_model(base_model or str(model))
    try:
        asked = _Asked(model, profile)
        how = _with_defaults(asked, stated | counted | method)
        if not (how.adapter and exact):  # peft finds its own layers, norms too
            _check_targets(asked.network(how), how)
        if how.adapter and not exact:
            kept = ", ".join(json.loads(how.adapter).get("modules_to_save") or ())
            notes.append(
                f"counted as LoRA of rank {how.lora_rank}"
                + (f" without trained copies of {kept}, so too low" if kept else "")
                + "; --exact builds the adapter itself"
            )
        if "parallel" in method and how.gpus == 1:
            notes.append(f"{how.parallel} is for several GPUs: name them, as in --gpu 8xH100")
        traced = asked.trace(how, notes, progress) if exact else None
        return _answer(asked, how, notes, traced or _instant_peak(asked, how))
    except FieldError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if model.checked != UNCHECKED:
            raise
        reason = f"its configuration has a value that cannot be used: {error}"
        raise InvalidRequestError(reason, "model") from None


def _check_targets(built: Network, method: Method) -> None:
    """Adapters on no layer would train nothing."""
    if method.has_adapters and not _adapter_elements(built, method):
        names = {
            each.name
            for section in built.sections
            for each in section.operators
            if section.is_checkpointed and each.kind == "linear"
        }
        raise InvalidRequestError(
            f"names no layer of the model: its blocks have {', '.join(sorted(names))}; or all-linear",
            "lora_target",
        )


def _asked_gpu(
    gpu: str | DeviceProfile | None,
) -> tuple[DeviceProfile | None, dict[str, int], list[str]]:
    """Profile, number of GPUs if the name states it, and what the name means if it is ambiguous."""
    if gpu is None or isinstance(gpu, DeviceProfile):
        return gpu, {}, []
    head, times, name = gpu.partition("x")
    counted = {"gpus": int(head)} if times and head.isdecimal() else {}
    asked = name if counted else gpu
    profile = find_profile(asked)
    others = [
        each.aliases[0]
        for each in device_profiles()
        if each.name != profile.name and any(a.startswith(f"{asked}-") for a in each.aliases)
    ]
    size = f"the {round(profile.capacity_bytes / GIB)} GB card, {profile.name}"
    note = f"{asked} means {size}; others: {', '.join(others[:3])}"
    return profile, counted, [note] * bool(others)


def _with_defaults(asked: _Asked, stated: Fields) -> Method:
    """The method with the defaults of the model; a quantised base stays quantised."""
    values, model, extracted = dict(stated), asked.model, asked.model.extracted
    if asked.reads_tokens:
        usual = model.longest or (extracted or {}).get("size") or SEQUENCE_LENGTH
        values.setdefault("sequence_length", min(SEQUENCE_LENGTH, usual))
    elif extracted is not None:
        usual = extracted["size"]
        if values.setdefault("resolution", usual) != usual and extracted["unit"] == "fixed":
            raise InvalidRequestError(
                f"is {usual} for this model: it is known at no other size", "resolution"
            )
    if "resolution" in stated and (asked.reads_tokens or extracted is None):
        raise InvalidRequestError(
            "is for networks of images that the catalogue extracted", "resolution"
        )
    if asked.kind == "diffusers":
        values.setdefault("lora_target", DIFFUSERS_TARGETS)
    elif extracted is not None:
        values.setdefault("checkpointing", False)  # as timm's and the Trainer's scripts do
    quantised = model.config.get("quantization_config") or {}
    if quantised.get("quant_method") in ("gptq", "awq"):
        values.setdefault("quantisation", "gptq")
    method = Method(**values)
    return method if asked.recomputes(method) else replace(method, checkpointing=False)


def _instant_peak(asked: _Asked, method: Method) -> ProcessPeak:
    """What a trace would say, by the instant depth."""
    peak, built = asked.peak(method), asked.network(method)
    parameters = asked.model.parameters or built.parameters
    return ProcessPeak(
        parameters=parameters,
        trained_parameters=_adapter_elements(built, method) if method.has_adapters else parameters,
        expected_bytes=asked.expected(method),
        safe_bytes=asked.safe(method),
        parts={**peak.parts, "context_bytes": asked.context.expected_bytes},
        moment=peak.moment,
        notes=(),
    )


def _answer(asked: _Asked, method: Method, notes: list[str], peak: ProcessPeak) -> FitAnswer:
    kernel, reason = asked.kernel(method)
    built, profile = asked.network(method), asked.profile
    blocks: Counter[str] = Counter()
    for section in built.sections:
        blocks[section.name] += section.count
    longest = max(asked.model.longest or MAX_SEQUENCE_LENGTH, method.sequence_length)
    available = judged = None
    if profile is not None:
        available = available_mib(profile)
        judged = verdict(ceil_mib(peak.expected_bytes), ceil_mib(peak.safe_bytes), available)
    return FitAnswer(
        model=asked.model.name,
        source=asked.model.source,
        checked=asked.model.checked,
        method=method,
        gpu=None if profile is None else profile.name,
        available_bytes=available and available * MIB,
        verdict=judged,
        blocks=tuple((count, name) for name, count in blocks.items()),
        attention=f"{kernel}: flash does not run, {reason}" if reason else kernel,
        table=tuple(_table(asked, method)),
        table_by=_axis(asked)[2],
        largest_batch=_largest(asked, method, "batch_size", MAX_SEARCHED_BATCH),
        longest_sequence=_largest(asked, method, "sequence_length", longest)
        if asked.reads_tokens
        else None,
        smallest_gpu=_smallest_gpu(asked, method),
        fewest_gpus=_fewest_gpus(asked, method),
        changes=() if judged in (None, YES) else tuple(_changes(asked, method)),
        depth="exact" if asked.traced else "instant",
        **asdict(peak) | {"notes": (*notes, *_notes(asked, built, method))},
    )


def _adapter_elements(built: Network, method: Method) -> int:
    return sum(
        section.count * sum(method.adapter_elements(operator))
        for section in built.sections
        for operator in section.operators
        if method.is_target(operator, section.is_checkpointed)
    )


def _notes(asked: _Asked, built: Network, method: Method) -> Iterator[str]:
    model, profile = asked.model, asked.profile
    if model.checked == "recalled":
        yield "the total of parameters was compared with a recalled number only"
    if "bf16" in method.precision and profile and profile.compute_capability < (8, 0):
        yield (
            f"{profile.aliases[0]} has no arithmetic in bf16, which is slow there, and no fast "
            "attention in it: ask with --precision amp_fp16"
        )
    if method.casts_frozen:
        yield "embeddings, norms and head are in fp32, by prepare_model_for_kbit_training"
    is_left = any(each.copies > 1 for section in built.sections for each in section.operators)
    if is_left and method.is_quantised and method.year >= FUSED_EXPERTS_SINCE:
        yield (
            f"the experts' weights stay in {8 * method.outer_bytes} bits: transformers 5 makes one "
            "parameter of them, which bitsandbytes leaves"
        )
    if method.optimizer.startswith("paged_"):
        yield "paged optimizer state is counted as lying in host memory"
    if method.splits_states:
        yield "DeepSpeed's buckets are counted as 2 x 200 million elements (reduce_bucket_size)"
    if model.longest and model.longest < method.sequence_length and asked.reads_tokens:
        yield f"{method.sequence_length:,} tokens are more than the {model.longest:,} that the model was made for"
    if method.is_sharded and method.is_autocast and not method.has_adapters:
        yield "shards of trained weights are in fp32, as accelerate makes them"
    if asked.kind == "diffusers":
        yield "of the pipeline, this network alone: text encoders and VAE are computed beforehand"
    if not built.recomputes:
        yield "transformers cannot recompute the blocks of this model"
    if asked.kind == "wav2vec2":
        yield f"a token is 20 ms: samples of {method.sequence_length / 50:.0f} seconds"
    if "vision_config" in model.config:
        yield "the vision tower's activations are not counted: samples of text only"


def _table(asked: _Asked, method: Method) -> Iterator[Document]:
    """Safe bytes of other methods and lengths; of other batch sizes where there are no tokens."""
    field, values, _ = _axis(asked)
    own = method.method
    for name in (own,) if field == "batch_size" else dict.fromkeys((*TABLE_METHODS, own)):
        for checkpointing in (True, False) if asked.recomputes(method) else (False,):
            row = replace(method, method=name, checkpointing=checkpointing)
            sizes = {
                str(value): asked.safe(replace(row, **{field: value}))
                for value in sorted({getattr(method, field), *values})
            }
            yield {"method": name, "checkpointing": checkpointing, "safe_bytes": sizes}


def _axis(asked: _Asked) -> tuple[str, tuple[int, ...], str]:
    """Along which field of a method the table goes, its values, and what they are called."""
    if asked.reads_tokens:
        longest = asked.model.longest or MAX_SEQUENCE_LENGTH
        lengths = [length for length in TABLE_LENGTHS if length <= longest]
        return "sequence_length", tuple(lengths[-4:]), "tokens of a sample"
    if asked.kind == "diffusers":
        return "resolution", TABLE_RESOLUTIONS, "pixels of a side"
    return "batch_size", TABLE_BATCHES, "samples of a batch"


def _largest(asked: _Asked, method: Method, field: str, most: int) -> int | None:
    """The largest value of a field that is safe, if larger ones are less so; 0 if 1 is not."""
    if asked.profile is None:
        return None

    def is_safe(value: int) -> bool:
        return asked.is_safe(method, **{field: value})

    if not is_safe(1):
        return 0
    low, high = 1, min(2, most)
    while high > low and is_safe(high):
        low, high = high, min(high * 2, most)
    while high - low > 1 and high - low > low // 64:
        middle = (low + high) // 2
        low, high = (middle, high) if is_safe(middle) else (low, middle)
    return min(low, most)


def _smallest_gpu(asked: _Asked, method: Method) -> str | None:
    desktops = sorted((each for each in device_profiles() if not each.is_laptop), key=available_mib)
    fitting = (each for each in desktops if replace(asked, profile=each).is_safe(method))
    return next((each.aliases[0] if each.aliases else each.name for each in fitting), None)


def _fewest_gpus(asked: _Asked, method: Method) -> int | None:
    if asked.profile is None:
        return None
    counts = (2**power for power in range(_MOST_GPUS.bit_length()))
    parallel = _sharding(method)
    return next((n for n in counts if asked.is_safe(method, gpus=n, parallel=parallel)), None)


def _sharding(method: Method) -> str:
    return method.parallel if method.parallel in SHARDED else "fsdp2"


def _changes(asked: _Asked, method: Method) -> Iterator[Change]:
    """The cheapest changes that make the job fit: single ones, else several together."""
    steps = list(_steps(asked, method))
    found = [each for each in steps if asked.is_safe(method, **each)]
    if not found:
        together = list(accumulate(steps, or_))[1:]
        found = [each for each in together if asked.is_safe(method, **each)][:1]
    for each in found[:_SHOWN_CHANGES]:
        changed = replace(method, **each)
        yield Change(*_words(asked, method, changed), asked.expected(changed), asked.safe(changed))


def _words(asked: _Asked, method: Method, changed: Method) -> tuple[str, str]:
    """What to do, and the command's options that do it: ``changes.json`` says for what changes, a
    field or its value, what to do and what it costs, and for a field its option."""
    texts, options = shipped_json("named/changes.json").values()
    before, after = asdict(method), asdict(changed)
    values = {name: after[name] for name in options if after[name] != before[name]}
    words = [texts.get(str(value)) or texts.get(name) for name, value in values.items()]
    named = {**after, "gpu": asked.profile and asked.profile.aliases[0].replace(" ", "-")}
    stated = " ".join(options[name] for name in values).format(**named)
    return " + ".join(filter(None, words)).format(**after), stated


def _steps(asked: _Asked, method: Method) -> Iterator[Fields]:
    """Single changes, in the order of their costs."""
    if method.has_adapters and method.frozen_bytes > HALF_BYTES and not method.is_quantised:
        yield {"frozen_bytes": HALF_BYTES}
    if method.kernels == "none" and asked.reads_tokens and asked.model.extracted is None:
        yield {"kernels": "liger"}
    if not method.checkpointing and asked.recomputes(method):
        yield {"checkpointing": True}
    if method.optimizer in ("adam", "adamw"):
        yield {"optimizer": "paged_adamw_8bit"}
    if method.batch_size > 1:
        # The first of a half, a quarter … that is safe.
        smaller = (method.batch_size >> power for power in range(1, method.batch_size.bit_length()))
        batch = next((each for each in smaller if asked.is_safe(method, batch_size=each)), 1)
        passes = method.gradient_accumulation * -(-method.batch_size // batch)
        yield {"batch_size": batch, "gradient_accumulation": passes}
    if method.method == "full" and asked.has_blocks(method):
        yield {"method": "lora"}
    if not method.is_quantised and asked.has_blocks(method):
        yield {"method": "qlora"}
    if method.sequence_length > _SHORT and asked.reads_tokens:
        yield {"sequence_length": method.sequence_length // 2}
    gpus = _fewest_gpus(asked, method)
    if gpus is not None and method.gpus < gpus <= _NODE_GPUS:
        yield {"gpus": gpus, "parallel": _sharding(method)}
