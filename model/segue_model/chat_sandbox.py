"""The Jinja environment of chat templates: what transformers offers, less the ways out, with a budget.

A template comes with the model file. The sandbox stops it from reaching Python; the budget stops it from looping or
growing text without end. Filters that blow up their input inside one step are not metered.
"""

import json

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

MAX_CHARACTERS = 8 << 20
MAX_STEPS = 200_000
_MAX_NUMBER_BITS = 4096
# A name that no template can write, so none can replace the budget.
BUDGET = " budget"


class Refusal(TemplateError):
    """The template called `raise_exception`; the words are its own."""


class Budget:
    """What one rendering may still do: bodies of loops and macros entered."""

    __slots__ = ("_steps",)

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def spend(self) -> None:
        """One step. Raises SecurityError when none is left."""
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"the template took more than {MAX_STEPS} steps")


class _MeteredCode(CodeGenerator):
    """Compiles every loop and macro body to pay a step first, and `~` to check what it builds."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - the name that NodeVisitor looks up
        node.body.insert(0, self._payment(node))
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:  # noqa: N802
        node.body.insert(0, self._payment(node))
        super().visit_Macro(node, frame)

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:  # noqa: N802
        node.body.insert(0, self._payment(node))
        super().visit_CallBlock(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.visit(_call("joined", list(node.nodes), node), frame)

    @staticmethod
    def _payment(node: nodes.Node) -> nodes.ExprStmt:
        return nodes.ExprStmt(_call("pay", [], node), lineno=node.lineno)


def _call(name: str, arguments: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
    """A call of an attribute of the environment, which template variables cannot shadow."""
    target = nodes.EnvironmentAttribute(name, lineno=node.lineno)
    return nodes.Call(target, arguments, [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}`, which training tools use to find the assistant's words: here just its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardedNamespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __init__(*args: object, **kwargs: object) -> None:
        values: dict[str, object] = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """One per template."""

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "namespace": _GuardedNamespace}

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """The operator, refused beforehand where the outcome would be out of proportion."""
        if operator == "*":
            _check_product(left, right)
        if operator == "**":
            _check_power(left, right)
        result: object = super().call_binop(context, operator, left, right)
        return _checked(result)

    @pass_context
    def pay(self, context: Context) -> None:
        """Called by compiled templates at each loop and macro body."""
        budget = context.parent[BUDGET]
        if isinstance(budget, Budget):
            budget.spend()

    def joined(self, *parts: object) -> str:
        """`a ~ b ~ c`."""
        return str(_checked("".join(map(str, parts))))


def _checked(value: object) -> object:
    if isinstance(value, (str, list)) and len(value) > MAX_CHARACTERS:
        raise SecurityError(f"the template built a value longer than {MAX_CHARACTERS}")
    return value


def _check_product(left: object, right: object) -> None:
    sizes = [len(v) if isinstance(v, (str, list, tuple)) else None for v in (left, right)]
    numbers = [v for v in (left, right) if isinstance(v, int)]
    for size in sizes:
        if size is not None and numbers and size * numbers[0] > MAX_CHARACTERS:
            raise SecurityError(f"the template built a value longer than {MAX_CHARACTERS}")
    if len(numbers) == 2 and sum(n.bit_length() for n in numbers) > _MAX_NUMBER_BITS:
        raise SecurityError(f"the template built a number of more than {_MAX_NUMBER_BITS} bits")


def _check_power(base: object, exponent: object) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_NUMBER_BITS:
        raise SecurityError(f"the template built a number of more than {_MAX_NUMBER_BITS} bits")


def _raise(message: object) -> None:
    raise Refusal(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
