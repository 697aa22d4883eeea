"""DNNPerf (Gao et al., ICSE-SEIP 2023): a graph network over a model's operators that learns the
memory of its training.

The abstract tells this: the model is a directed acyclic graph, whose nodes and edges carry features
of what they compute and
move.  An attention-based node-edge encoder (ANEE) encodes both.  It learned from thousands of
measured configurations. The network itself is not described there and its code is not public.
Assumptions:

* Nodes are a job's layers, in order: what the datasets keep of thousands of jobs.  They form a
  chain, and branches are not told.
* Features of a node: its kind, and the bytes of its weights, of its input and of its output for the
  whole batch.  The paper also has attributes and FLOPs, which need the channels and kernels that a
  stored layer does not have.
* Features of an edge: the bytes of the tensor that it carries.  Each is there in both directions,
  since the backward pass goes back along it; with one direction, attention over the neighbours in a
  chain would have nothing to choose from.
* Features of the whole job: batch size and optimizer.  The GPU is left out, because labels are
  taken above its CUDA context.
* One ANEE layer: an edge is encoded from its ends and itself; a node adds up its incoming edges by
  attention, and then itself.
* The answer is the sum of what all nodes and edges contribute, and of a constant part, each exp(an
  output): memory adds up.
* It is trained on the absolute error of log-bytes, with AdamW under a one-cycle schedule, for a
  fixed number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import KINDS
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.physics.optimizers import OPTIMIZER_RULES
from gpumemnet.units import MIB

from .estimator import NotCoveredError, PublishedEstimator, Subject

Array = NDArray[np.float64]
NAME: Final = "DNNPerf"
NEEDS: Final = "layers"
LEAVES_OUT: Final = "whatever its graph does not say; the context is added"
SOURCE: Final = "Gao et al., ICSE-SEIP 2023"

WIDTH: Final = 32
LAYERS: Final = 2
STEPS: Final = 800
BATCH_JOBS: Final = 16
LEARNING_RATE: Final = 4e-3
_NODE_FEATURES: Final = 3
_OPTIMIZERS: Final = tuple(OPTIMIZER_RULES)
_LOG_SCALE: Final = 10.0
"""Log-bytes are divided by this, so that they are of the size of one."""


@dataclass(frozen=True, slots=True, eq=False)
class Graphs:
    """``B`` jobs as one graph of ``N`` nodes and ``E`` edges.

    Attributes:
        kinds: kind of each node, as a position in :data:`gpumemnet.job.layers.KINDS`, shape
            ``[N]``.
        nodes: log-bytes of its weights, its input and its output, scaled, shape ``[N, 3]``.
        ends: the nodes that each edge goes from and to, shape ``[2, E]``.
        edges: log-bytes of the tensor on each edge, scaled, shape ``[E, 1]``.
        jobs: log of the batch size, and one of the optimizers, shape ``[B, 1 + optimizers]``.
        job_of_node, job_of_edge: shape ``[N]`` and ``[E]``.
    """

    kinds: Tensor
    nodes: Tensor
    ends: Tensor
    edges: Tensor
    jobs: Tensor
    job_of_node: Tensor
    job_of_edge: Tensor

    @classmethod
    def of(cls, jobs: Sequence[TrainingJob]) -> Self:
        """The graphs of ``jobs``, all of which have layers."""
        table = JobTable.from_jobs(jobs)
        owner, counts = table.layer_owners, table.layer_counts
        firsts = np.cumsum(counts) - counts
        elements = [ELEMENT_BYTES[job.precision] for job in jobs]
        batch = table.column("batch_size")
        output = (
            table.layer_activations
            * (batch * np.array([each.activation for each in elements]))[owner]
        )
        given = (
            table.column("input_elements") * batch * np.array([each.inputs for each in elements])
        )
        read = np.concatenate(([0.0], output[:-1]))
        read[firsts] = given
        weights = table.layer_parameters * np.array([each.weight for each in elements])[owner]
        later = np.setdiff1d(np.arange(len(owner)), firsts)
        ends = np.concatenate((np.stack((later - 1, later)), np.stack((later, later - 1))), axis=1)
        optimizers = np.array(
            [[float(job.optimizer == name) for name in _OPTIMIZERS] for job in jobs]
        )
        return cls(
            kinds=torch.from_numpy(table.known_kinds),
            nodes=_logs(np.stack((weights, read, output), axis=1)),
            ends=torch.from_numpy(ends),
            edges=_logs(np.tile(read[later], 2)[:, None]),
            jobs=torch.cat((_logs(batch[:, None]), torch.from_numpy(optimizers).float()), dim=1),
            job_of_node=torch.from_numpy(owner),
            job_of_edge=torch.from_numpy(np.tile(owner[later], 2)),
        )


def _logs(amounts: Array) -> Tensor:
    return torch.from_numpy(np.log1p(amounts) / _LOG_SCALE).float()


class NodeEdgeEncoder(nn.Module):
    """One layer that encodes edges by their ends, and nodes by attention over their incoming
    edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Linear(3 * width, width)
        self.score = nn.Linear(2 * width, 1)
        self.value = nn.Linear(2 * width, width)
        self.own = nn.Linear(width, width)

    def forward(self, nodes: Tensor, edges: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Encode nodes of shape ``[N, W]`` and edges of shape ``[E, W]``; both keep what they
        were."""
        source, target = nodes[ends[0]], nodes[ends[1]]
        edges = edges + torch.relu(self.edge(torch.cat((source, target, edges), dim=1)))
        weights = torch.exp(
            torch.tanh(self.score(torch.cat((target, edges), dim=1)))
        )  # tanh: no overflow
        sums = nodes.new_zeros(len(nodes), 1).index_add(0, ends[1], weights)
        values = self.value(torch.cat((source, edges), dim=1)) * weights / sums[ends[1]]
        heard = torch.zeros_like(nodes).index_add(0, ends[1], values)
        return nodes + torch.relu(self.own(nodes) + heard), edges


class DnnPerfNetwork(nn.Module):
    """The graph network: graphs to log-bytes of memory."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.kind = nn.Embedding(len(KINDS), width)
        self.node = nn.Linear(_NODE_FEATURES, width)
        self.edge = nn.Linear(1, width)
        self.job = nn.Linear(1 + len(_OPTIMIZERS), width)
        self.encoders = nn.ModuleList(NodeEdgeEncoder(width) for _ in range(layers))
        self.node_part = nn.Sequential(
            nn.Linear(2 * width + _NODE_FEATURES, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.edge_part = nn.Sequential(
            nn.Linear(2 * width + 1, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.constant_part = nn.Linear(width, 1)

    def forward(self, graphs: Graphs) -> Tensor:
        """Log-bytes of each job, shape ``[B]``."""
        job = torch.relu(self.job(graphs.jobs))
        nodes, edges = self.kind(graphs.kinds) + self.node(graphs.nodes), self.edge(graphs.edges)
        for encoder in self.encoders:
            nodes, edges = encoder(nodes, edges, graphs.ends)
        of_nodes = self.node_part(torch.cat((nodes, job[graphs.job_of_node], graphs.nodes), dim=1))[
            :, 0
        ]
        of_edges = self.edge_part(torch.cat((edges, job[graphs.job_of_edge], graphs.edges), dim=1))[
            :, 0
        ]
        total = torch.exp(self.constant_part(job)[:, 0])
        total = total.index_add(0, graphs.job_of_node, torch.exp(of_nodes * _LOG_SCALE / 4))
        total = total.index_add(0, graphs.job_of_edge, torch.exp(of_edges * _LOG_SCALE / 4))
        return torch.log(total) + float(np.log(MIB))


def train_dnnperf(
    jobs: Sequence[TrainingJob], above_context_bytes: Array, seed: int = 0, steps: int = STEPS
) -> PublishedEstimator:
    """Train a network; returns the estimator.

    Args:
        jobs: all with layers.
        above_context_bytes: their memory without the CUDA context; rows with NaN, of runs out of
            memory, are not learned from.
        seed: of the network and of the order of the jobs.
        steps: of training.
    """
    known = np.flatnonzero(~np.isnan(above_context_bytes))
    logs = torch.from_numpy(np.log(np.maximum(above_context_bytes[known], MIB))).float()
    chosen = [jobs[row] for row in known.tolist()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = DnnPerfNetwork()
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LEARNING_RATE, total_steps=steps
    )
    random = np.random.default_rng(seed)
    for _ in range(steps):
        some = random.choice(len(chosen), min(BATCH_JOBS, len(chosen)), replace=False).tolist()
        optimizer.zero_grad()
        loss = (network(Graphs.of([chosen[row] for row in some])) - logs[some]).abs().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return _estimator(network.eval())


def _estimator(network: DnnPerfNetwork) -> PublishedEstimator:
    def parts(subject: Subject) -> Mapping[str, int]:
        if not subject.job.layers:
            raise NotCoveredError("the job has no layers")
        with torch.no_grad():
            amount = float(torch.exp(network(Graphs.of([subject.job])).double())[0])
        return {"learned": round(amount), "context": subject.context_bytes}

    return PublishedEstimator(
        name=NAME, needs=NEEDS, leaves_out=LEAVES_OUT, source=SOURCE, parts=parts
    )
