"""The form that an answer must have: text, JSON by a schema, or calls of tools."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ragserve.answering.answer_reader import AnswerReader
from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import Sampling
from ragserve.engine.grammars import check_constraint, check_schema
from ragserve.engine.tool_calls import ToolFormat
from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    from ragserve.answering.query import Query

JSON_SYSTEM = "Answer the question using only the documents, as JSON. If they do not hold the answer, say so."
TOOLS_SYSTEM = (
    "Answer the question using the documents, and call a tool for what they do not hold. "
    "Cite the documents you use as [1], [2], ... in the order in which they are given."
)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of one answer.

    Args:
        constraint: Sampling parameters of SGLang that hold the model to it.
        system: Our system text, in place of that for plain answers.
        format: How the model writes calls; None without tools.
    """

    query: Query
    constraint: dict[str, str] = field(default_factory=dict)
    system: str | None = None
    format: ToolFormat | None = None

    def sampling(self, sampling: Sampling) -> Sampling:
        """Sampling parameters with the constraint. Special tokens may be parts of calls."""
        return replace(sampling, constraint=self.constraint, special_tokens=self.format is not None)

    def reader(self, n_passages: int) -> AnswerReader:
        query, calls = self.query, None
        if self.format is not None and query.tools is not None:
            earlier = sum(len(message.tool_calls) for message in (*query.history, *query.turns))
            tools, choice = query.tools.tools, query.tools.choice
            calls = self.format.reader(tools, choice, earlier, may_fence=query.schema is None)
        return AnswerReader(n_passages, as_json=query.schema is not None, calls=calls)


class AnswerForms:
    """Checks what form queries ask for."""

    def __init__(
        self, prompts: PromptBuilder, *, every_grammar: bool = False, parser: str | None = None
    ) -> None:
        """``every_grammar``: the operator has opened expressions. ``parser``: SGLang's parser of calls, if
        the operator has chosen one."""
        self._prompts, self._every_grammar, self._parser = prompts, every_grammar, parser
        self._format: ToolFormat | None = None
        self._lock = asyncio.Lock()

    async def of(self, query: Query) -> AnswerForm:
        """The form that a query asks for. Raises InvalidRequest for one that cannot be had."""
        if query.session is not None and (query.tools is not None or query.turns):
            raise InvalidRequest(
                "The turns of a session have no tools.",
                hint="Send the earlier messages instead of a session.",
                param="tools" if query.tools is not None else "messages",
            )
        if query.tools is None and query.schema is None:
            turns = (*query.history, *query.turns)
            if not any(message.tool_calls for message in turns):
                return AnswerForm(query)
            return AnswerForm(query, await self._no_calls())
        format = None if query.tools is None else await self._tool_format()
        return await asyncio.to_thread(self._constrained, query, format)

    def _constrained(self, query: Query, format: ToolFormat | None) -> AnswerForm:
        schema, tools = None, query.tools
        if query.schema is not None:
            try:
                schema = check_schema(query.schema, every=self._every_grammar)
            except ValueError as error:
                raise InvalidRequest(f"response_format: {error}.", param="response_format") from None
        if tools is None or format is None:
            return AnswerForm(query, {"json_schema": schema or ""}, JSON_SYSTEM)
        try:
            for tool in tools.tools:
                if tool["function"].get("strict"):
                    check_schema(tool["function"].get("parameters") or {}, every=self._every_grammar)
            constraint = format.constraint(tools.tools, tools.choice, parallel=tools.parallel, schema=schema)
            check_constraint(constraint, every=self._every_grammar)
        except ValueError as error:
            raise InvalidRequest(f"tools: {error}.", param="tools") from None
        return AnswerForm(query, constraint, TOOLS_SYSTEM, format)

    async def _no_calls(self) -> dict[str, str]:
        """What keeps a model from calls after those that it has made, where it may make no more: some write
        them into the answer."""
        try:
            format = await self._tool_format()
        except InvalidRequest:  # its template shows it none
            return {}
        return await asyncio.to_thread(format.no_calls)

    async def _tool_format(self) -> ToolFormat:
        async with self._lock:
            if self._format is None:
                if not await asyncio.to_thread(lambda: self._prompts.offers_tools):
                    raise _no_tools(
                        "This model's chat template takes no tools, so the model cannot call any.",
                        "Leave tools out, or serve a model whose template takes them.",
                    )
                self._format = await asyncio.to_thread(ToolFormat.of, self._prompts.tokenizer, self._parser)
        if self._format is None:
            raise _no_tools(
                "SGLang does not say by which parser this model's calls of tools are read.",
                "The server's --engine-args '{\"tool_call_parser\": ...}' names one.",
            )
        if not self._format.is_served:
            raise _no_tools(
                f"Calls of tools as {self._format.parser} reads them are not served: some answers would "
                "stop the server.",
                "Leave tools out, or serve another model.",
            )
        return self._format


def _no_tools(message: str, hint: str) -> InvalidRequest:
    return InvalidRequest(message, hint=hint, code="tools_not_served", param="tools")


def tool_parser(engine_args: dict[str, Any]) -> str | None:
    """The parser that an operator's ``engine_args`` name."""
    named = engine_args.get("tool_call_parser")
    return named if isinstance(named, str) else None
