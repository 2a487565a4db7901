"""The public surface: a name that comes or goes is a conscious act."""

import doctest
import inspect
import re
import sys

import pytest

import fedquilt as fq

PUBLIC = [
    "ADDS",
    "AGGREGATORS",
    "ALIE",
    "APFL",
    "ATTACKS",
    "Accountant",
    "Aggregate",
    "AggregationPipeline",
    "Aggregator",
    "Attack",
    "Backdoor",
    "BaseMethod",
    "BatchLoss",
    "Budget",
    "CSVTracker",
    "Cadence",
    "Callback",
    "CapWeight",
    "CenteredClipping",
    "Centralised",
    "CheckpointSaved",
    "Client",
    "ClientContext",
    "ClientDone",
    "ClientResult",
    "ClipNorm",
    "ClipQuantile",
    "Comparison",
    "CoordinateRule",
    "Cost",
    "Dataset",
    "Decoder",
    "DepthFL",
    "Engine",
    "EqualWeights",
    "Evaluated",
    "Event",
    "Failure",
    "FaultPolicy",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDrop",
    "FedPA",
    "FedRolex",
    "FedYogi",
    "FedquiltError",
    "FjORD",
    "FullMean",
    "GaussianNoise",
    "GeometricMedian",
    "HeteroFL",
    "InnerProduct",
    "Krum",
    "LOSSES",
    "LabelFlip",
    "LearningTask",
    "LocalEngine",
    "LocalSGD",
    "LocalTraining",
    "Loss",
    "METHODS",
    "METRICS",
    "MLflowTracker",
    "MODELS",
    "Mean",
    "Median",
    "Method",
    "Metric",
    "MetricInfo",
    "Mimic",
    "MultiKrum",
    "NeFL",
    "PFedMe",
    "PGD",
    "Part",
    "Phase",
    "Population",
    "Privacy",
    "PrivacySpent",
    "ProblemFound",
    "ProgressBar",
    "Recipe",
    "RobustAggregator",
    "RoundDone",
    "RoundStarted",
    "Run",
    "RunEnded",
    "RunStarted",
    "SERVER_OPTIMIZERS",
    "SGDSettings",
    "SHeteroFL",
    "STC",
    "ScaledUpdate",
    "SecureAggregation",
    "Selection",
    "ServerOptimizer",
    "ServerSGD",
    "ServerUpdate",
    "Setup",
    "SignFlip",
    "SizeScore",
    "SplitMix",
    "State",
    "Structure",
    "Subnet",
    "TRACKERS",
    "Task",
    "TensorBoardTracker",
    "TorchMetric",
    "TorchOptimizer",
    "Tracker",
    "TrimmedMean",
    "Update",
    "UpdateError",
    "UpdateTransform",
    "Validator",
    "VectorRule",
    "WandbTracker",
    "__version__",
    "audit_run",
    "average",
    "build_module",
    "chain",
    "compare",
    "compute_cost",
    "copy_subnet_tensors",
    "declare_structure",
    "evaluate",
    "export",
    "fed_uniform",
    "fedavg_at",
    "fedavg_oat",
    "fit_budget",
    "lg_fedavg",
    "load_dataset",
    "load_pretrained",
    "make_clients",
    "make_model",
    "make_optimizer",
    "metric",
    "open_run",
    "standalone",
    "trace_structure",
    "train",
    "transforms",
    "write_report",
]
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(fq, name))]
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(fq, name))]


def test_these_are_the_public_names():
    assert sorted(fq.__all__) == PUBLIC
    assert all(hasattr(fq, name) for name in PUBLIC)


@pytest.mark.parametrize("name", CLASSES + FUNCTIONS)
def test_a_public_name_says_what_it_does(name):
    doc = inspect.getdoc(getattr(fq, name))
    assert doc
    assert not doc.startswith(f"{name}(")  # what a dataclass says of itself


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_of_public_classes_are_described(name):
    for key, value in vars(getattr(fq, name)).items():
        if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert inspect.getdoc(getattr(getattr(fq, name), key)), key


def is_interface(cls):
    """Whether users implement a class: it is a protocol, or has abstract methods of its own."""
    own = [value for value in vars(cls).values() if inspect.isfunction(value)]
    is_abstract = any(getattr(value, "__isabstractmethod__", False) for value in own)
    return is_abstract or getattr(cls, "_is_protocol", False)


def list_parameters(obj):
    """The arguments of a function or of a class's constructor; a protocol or an error has none."""
    is_bare = inspect.isclass(obj) and (
        getattr(obj, "_is_protocol", False)
        or issubclass(obj, BaseException)
        or obj.__init__ is object.__init__
    )
    return [] if is_bare else list(inspect.signature(obj).parameters)


def read_docs(obj):
    """The docstring of a name, and those of the public classes whose arguments it inherits."""
    above = inspect.getmro(obj)[1:] if inspect.isclass(obj) else ()
    public = [base for base in above if base.__name__ in PUBLIC]
    return [inspect.getdoc(each) or "" for each in (obj, *public)]


def describes(doc, parameter):
    """Whether a docstring has a parameter under ``Args``, or names it as code."""
    _, _, args = doc.partition("Args:\n")
    listed = re.search(rf"^    {parameter}: \S", args, re.MULTILINE)
    return bool(listed) or f"``{parameter}``" in doc


@pytest.mark.parametrize("name", CLASSES + FUNCTIONS)
def test_arguments_of_a_public_name_are_described(name):
    obj = getattr(fq, name)
    docs = read_docs(obj)
    missing = [p for p in list_parameters(obj) if not any(describes(doc, p) for doc in docs)]
    assert not missing


@pytest.mark.parametrize(
    "name", [n for n in CLASSES if is_interface(getattr(fq, n))] + ["ClientContext"]
)
def test_arguments_of_methods_that_users_write_or_call_are_described(name):
    cls = getattr(fq, name)
    inherited = {key for base in cls.__mro__[1:] for key in vars(base)}  # described there
    own = {key: value for key, value in vars(cls).items() if key not in inherited}
    methods = {key: value for key, value in own.items() if inspect.isfunction(value)}
    missing = [
        f"{key}({parameter})"
        for key, method in methods.items()
        for parameter in inspect.signature(method).parameters
        if not key.startswith("_") and parameter != "self"
        if not any(describes(inspect.getdoc(each) or "", parameter) for each in (method, cls))
    ]
    assert not missing


def read_examples(doc):
    """The code of a docstring's examples, without those that are skipped."""
    examples = doctest.DocTestParser().get_examples(doc or "")
    return "".join(e.source for e in examples if doctest.SKIP not in e.options)


def has_own_example(obj):
    """Whether the docstring of a class or function, or of a method, has an example."""
    members = vars(obj).values() if inspect.isclass(obj) else ()
    methods = [member for member in members if inspect.isroutine(member)]
    return any(read_examples(part.__doc__) for part in (obj, *methods))


def is_used_in_a_module_example(name):
    """Whether a module that has the name uses it in the examples of its docstring."""
    modules = [m for key, m in sys.modules.items() if key.split(".")[0] == "fedquilt"]
    docs = [m.__doc__ for m in modules if vars(m).get(name) is getattr(fq, name)]
    return any(re.search(rf"\b{name}\b", read_examples(doc)) for doc in docs)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name):
    is_described = name in CLASSES + FUNCTIONS
    has_own = is_described and has_own_example(getattr(fq, name))
    assert has_own or is_used_in_a_module_example(name)
