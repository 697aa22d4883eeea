"""Job documents as clients send them, for property tests."""

from typing import Any

from hypothesis import strategies as st

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.json_codec import job_from_dict, job_to_dict
from gpumemnet.job.training_job import JOB_FIELDS, TrainingJob
from tests.jobs import jobs

oddities = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-2, 2**51),
    st.sampled_from(
        [
            2**50,
            2**50 + 1,
            2**31 - 1,
            2**31,
            0,
            -1,
            1.0,
            "mlp",
            "adam",
            "relu",
            "none",
            "",
            [],
            {},
            [[]],
            [{}],
            [7],
        ]
    ),
    st.floats(),
    st.text(max_size=5),
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "kind": st.text(max_size=3),
                "activations": st.integers(-1, 3),
                "x": st.none(),
            },
        )
    ),
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """What clients send: a job with all or some of its fields, its layers as objects or lists, and
    now and then nonsense."""
    document = job_to_dict(draw(jobs()))
    form = draw(st.sampled_from(["objects", "short", "lists", "mixed"]))
    if form != "objects":
        document["layers"] = [
            [*layer.values()]
            if form == "lists" or (form == "mixed" and place % 2)
            else {name: value for name, value in layer.items() if value or name != "parameters"}
            for place, layer in enumerate(document["layers"])
        ]
    for name in draw(st.lists(st.sampled_from(JOB_FIELDS), max_size=4)):
        document.pop(name, None)
    if draw(st.integers(0, 3)) == 0:
        document[draw(st.sampled_from([*JOB_FIELDS, "batchsize"]))] = draw(oddities)
    if (
        document.get("layers")
        and isinstance(document["layers"], list)
        and draw(st.integers(0, 5)) == 0
    ):
        place = draw(st.integers(0, len(document["layers"]) - 1))
        layer = document["layers"][place]
        if isinstance(layer, dict):
            names = ["kind", "activations", "parameters", "trains", "block", "width"]
            layer[draw(st.sampled_from(names))] = draw(oddities)
        else:
            document["layers"][place] = draw(oddities)
    return document


def read_alone(document: object) -> TrainingJob | None:
    """What the careful reader makes of ``document``; ``None`` where it refuses it."""
    try:
        return job_from_dict(document)
    except InvalidJobError:
        return None
