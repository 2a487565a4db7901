"""The scores of one size: what a net of that size costs, and the values of the metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedquilt.formatting import format_si, make_data_frame, make_html_table
from fedquilt.learning.metric import MetricInfo
from fedquilt.learning.task import CLASSIFICATION

ACCURACY = CLASSIFICATION.metric.name
VALUES = {  # the fields that are values of the metric, and what comes before and after its name
    "value": "",
    "local_value": "local_",
    "user_value": "user_",
    "robust_value": "robust_",
    "personal_value": "personal_",
    "group_values": "group_",
}


def name_in_json(field: str, metric: MetricInfo) -> str:
    """The name of a field of a score in JSON, where values are called by the metric.

    >>> name_in_json("user_value", CLASSIFICATION.metric), name_in_json("params", MetricInfo("r2"))
    ('user_accuracy', 'params')
    """
    if metric.name == "loss" and field == "value":
        return "value"  # the loss has its own field, of the server's data alone
    return f"{VALUES[field]}{metric.name}" if field in VALUES else field


@dataclass(frozen=True)
class SizeScore:
    """The scores of the net of one width, at one robustness.

    Values are those of the metric, which is accuracy unless the task has another. Then ``accuracy``
    is the same as ``value``, ``user_accuracy`` as ``user_value``, and so on; they are None where
    the metric is another.

    Args:
        width: The size of the net.
        params: The number of its parameters.
        macs: Multiply-accumulate operations for one example.
        value: On the server's held-out data; None without such data.
        local_value: On clients' test data, among each one's own classes; None without such data,
            or without classes.
        loss: On the server's held-out data; None without such data, or if it is not finite.
        num_examples: The number of targets that were tested.
        user_value: The mean over clients of the value on their test data.
        robustness: The setting of the robustness dial; None: there is no dial.
        robust_value: The mean over clients of the value under attack; None without an attack.
        personal_value: Of clients' own nets on their own data, or of this net with statistics of
            each client's own data; None if there are none, or if that was not asked for.
        perplexity: The exponential of the loss, where examples have several targets.
        group_values: The user value in each domain.
        batch_statistics: Whether each batch of test data was normalized by itself.
        metric: The metric: its name, and whether higher is better.
        metrics: All metrics of the task, on the server's data, or else on all clients' test data.

    >>> import torch, fedquilt as fq
    >>> inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    >>> clients = fq.make_clients((inputs, labels), test=(inputs, labels), count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> run = fq.train(model, inputs[:1], "fedavg", clients, rounds=1, workers=0)
    >>> run.scores[0].width, run.scores[0].params, run.scores[0].num_examples
    (1.0, 67, 12)
    """

    width: float
    params: int
    macs: int
    value: float | None  # None without held-out data
    local_value: float | None  # None where clients have no test data of their own
    loss: float | None  # None without held-out data, and where it is not finite
    num_examples: int  # targets, where each example has several
    user_value: float | None = None  # mean over clients with test data
    robustness: float | None = None  # the dial; None where there is none
    robust_value: float | None = None  # mean over clients; None without an attack
    personal_value: float | None = None  # of clients' own nets, or with their own statistics
    perplexity: float | None = None  # exp(loss) where examples have several targets
    group_values: Mapping[str, float] | None = None  # user value in each domain
    batch_statistics: bool = False  # whether each batch of test data was normalised by itself
    metric: MetricInfo = CLASSIFICATION.metric
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The value, if the metric is accuracy."""
        return self._if_accuracy(self.value)

    @property
    def local_accuracy(self) -> float | None:
        """The local value, if the metric is accuracy."""
        return self._if_accuracy(self.local_value)

    @property
    def user_accuracy(self) -> float | None:
        """The user value, if the metric is accuracy."""
        return self._if_accuracy(self.user_value)

    @property
    def robust_accuracy(self) -> float | None:
        """The robust value, if the metric is accuracy."""
        return self._if_accuracy(self.robust_value)

    @property
    def personal_accuracy(self) -> float | None:
        """The personal value, if the metric is accuracy."""
        return self._if_accuracy(self.personal_value)

    @property
    def group_accuracy(self) -> Mapping[str, float] | None:
        """The values in each domain, if the metric is accuracy."""
        return self.group_values if self.metric.name == ACCURACY else None

    def _if_accuracy(self, value: float | None) -> float | None:
        return value if self.metric.name == ACCURACY else None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, in which values are called by the metric: ``user_accuracy``, ``r2``."""
        document = {}
        for one in fields(self):
            value = getattr(self, one.name)
            name = name_in_json(one.name, self.metric)
            document[name] = asdict(value) if isinstance(value, MetricInfo) else value
        return document

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> SizeScore:
        """The score of a JSON object.

        Args:
            document: What ``to_json`` returned.
        """
        metric = MetricInfo(**document["metric"])
        names = {name_in_json(one.name, metric): one.name for one in fields(SizeScore)}
        values = {names[name]: value for name, value in document.items() if name in names}
        return SizeScore(**{**values, "metric": metric})

    def __repr__(self) -> str:
        """The fields that have a value."""
        values = {name: value for name, value in self.to_json().items() if name != "metric"}
        given = (f"{n}={v!r}" for n, v in values.items() if v is not None and v != {})
        return f"SizeScore({', '.join(given)})"

    def _repr_html_(self) -> str:
        return Scores((self,))._repr_html_()


class Scores(tuple[SizeScore, ...]):
    """The scores of several sizes: a tuple that notebooks show as a table.

    >>> scores = Scores([SizeScore(0.5, 35, 32, 0.8, None, 0.3, 50)])
    >>> scores.to_pandas().loc[0.5, "accuracy"]
    np.float64(0.8)
    """

    __slots__ = ()

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values by name, without what no score has."""
        rows = []
        for score in self:
            row = {n: v for n, v in score.to_json().items() if n not in ("metric", "metrics")}
            row |= {n: v for n, v in score.metrics.items() if n not in row}
            groups = row.pop(name_in_json("group_values", score.metric), None) or {}
            rows.append(row | {f"{score.metric.name} in {group}": v for group, v in groups.items()})
        names = dict.fromkeys(name for row in rows for name in row)
        known = [name for name in names if any(row.get(name) is not None for row in rows)]
        return [{name: row.get(name) for name in known} for row in rows]

    def to_pandas(self) -> Any:
        """A data frame of pandas, with a row for each size and the width as index."""
        return make_data_frame(self.to_dicts(), "width")

    def _repr_html_(self) -> str:
        rows = self.to_dicts()
        names = [name for name in rows[0] if name != "batch_statistics"] if rows else []
        header = [HEADERS.get(name, name.replace("_", " ")) for name in names]
        metrics = [score.metric for score in self]
        return make_html_table(
            header,
            [
                [_format_cell(name, row[name], metric) for name in names]
                for row, metric in zip(rows, metrics, strict=True)
            ],
        )


HEADERS = {"params": "parameters", "macs": "MACs", "num_examples": "examples"}


def _format_cell(name: str, value: Any, metric: MetricInfo) -> str:
    if value is None:
        return "-"
    if metric.name in name:
        return metric.format(value)
    if name == "macs":
        return format_si(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
