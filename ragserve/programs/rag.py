"""`Rag`: retrieve, insert and answer inside ``@sgl.function``."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from ragserve.answering.results import EarlierTurn, RetrievedPassage
from ragserve.client import Client, SearchArguments, Turn
from ragserve.client.calls import where
from ragserve.errors import InvalidRequest, NotFound
from ragserve.programs.said_turns import SaidTurns
from ragserve.setting_groups.per_namespace import NamespaceSettings
from sglang_ext.wire.joint_names import joint_name, matches, names_of

if TYPE_CHECKING:
    from ragserve.programs.prompt_text import PromptText


_MOST_READ = 1024  # questions whose correction is remembered


@dataclass(frozen=True, slots=True)
class Context:
    """Passages in a state, in prompt order, numbered by ``index`` from 1; ``dropped`` ones did not fit.
    ``earlier``: what is left of each turn before the question, where it had a budget."""

    passages: tuple[RetrievedPassage, ...]
    dropped: tuple[RetrievedPassage, ...] = ()
    earlier: tuple[EarlierTurn, ...] = ()

    def cited(self, answer: str, question: str = "") -> list[RetrievedPassage]:
        """Passages that an answer to ``question`` rests on, by the server's rule: for each sentence those of
        its markers ``[n]``, else those that support it. A short answer is judged with the question."""
        from ragserve.answering.citations import MarkerFilter
        from ragserve.answering.support import attribute

        markers = MarkerFilter(len(self.passages))
        text = markers.feed(answer) + markers.end()
        passages = [(passage.title, passage.text) for passage in self.passages]
        found = attribute(text, markers.markers, question, passages)
        numbers = sorted({number for sentence in found for number in sentence.passages})
        return [self.passages[number - 1] for number in numbers]


class Rag:
    """Retrieval from one server, from a namespace or several. Thread-safe: forks of a program may share it.

    Prompts are laid out as in /rag/query, with the server's tokenizer, and the system text that the
    namespace has when the first prompt is begun, else the server's. A question in which the server has
    corrected typing errors when it was searched for is asked as corrected, unless the search had another
    ``spelling`` than ``on``. Give ``tokenizer`` if the server's path does not exist on this machine, and
    ``system`` to replace the system text, as for namespaces that differ in it."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:30000",
        *,
        namespace: str = "default",
        namespaces: Sequence[str] = (),
        api_key: str | None = None,
        tokenizer: str | None = None,
        system: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """``namespaces``: several, by names and by patterns such as ``docs-*``, in place of ``namespace``."""
        self.url = url.rstrip("/")
        self.namespace = joint_name(namespaces) if namespaces else namespace
        self._api_key = api_key
        self._tokenizer = tokenizer
        self._system = system
        self._client = Client(url, api_key=api_key, timeout_s=timeout_s)
        self._text: PromptText | None = None
        self._reads: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connection to the server."""
        self._client.close()

    def endpoint(self) -> Any:
        """Return SGLang's ``RuntimeEndpoint``, sharing the prefix cache with the namespace's queries.

        A plain ``sgl.RuntimeEndpoint(url, api_key=...)`` also works, with a separate prefix cache."""
        from ragserve.engine.base import GenerateRequest
        from ragserve.engine.stream import payload
        from ragserve.programs._sglang import endpoint_class

        key = payload(GenerateRequest("", [], self.joint_namespace()), "")["extra_key"]
        return endpoint_class()(self.url, api_key=self._api_key, extra_key=key)

    def retrieve(
        self,
        question: str,
        k: int | None = None,
        *,
        history: Sequence[tuple[str, str]] = (),
        **options: Unpack[SearchArguments],
    ) -> list[RetrievedPassage]:
        """Find the ``k`` best passages (default: the server's ``top_k``), best first; ``options`` are those
        of `SearchArguments`.

        With ``history``, earlier (question, answer) pairs, the question is a follow-up; ``follow_ups`` says
        what is searched for (default: the server's)."""
        found = self._client.retrieve(
            question,
            **where(self.namespace),
            k=k,
            history=_messages(history) if history else None,
            **options,
        )
        with self._lock:
            self._reads.pop(question, None)
            if found.searched_for is not None and found.searched_for.model_reads is not None:
                self._reads[question] = found.searched_for.model_reads
                if len(self._reads) > _MOST_READ:
                    self._reads.popitem(last=False)
        return found.results

    def context(
        self,
        s: Any,
        question: str,
        k: int | None = None,
        *,
        history: Sequence[tuple[str, str]] = (),
        reserve: int = 256,
        **options: Unpack[SearchArguments],
    ) -> Context:
        """Begin the state's prompt with the passages for ``question``; see `retrieve` and `insert`."""
        _must_be_empty(s)
        found = self.retrieve(question, k, history=history, **options)
        return self.insert(s, found, reserve=reserve)

    def insert(
        self, s: Any, passages: Iterable[RetrievedPassage | tuple[str, str]], *, reserve: int = 256
    ) -> Context:
        """Begin the state's prompt with the system text and these passages (or ``(title, text)`` pairs), in
        this order.

        The last passages are dropped if they leave fewer than ``reserve`` tokens of the context for questions
        and answers. Raises ``InvalidRequest`` if the state already holds text: documents come first, as in
        the model's training. Give each hop its own state (``with s.copy() as hop:``) while ``s`` is empty."""
        _must_be_empty(s)
        layout = self._layout()
        numbered = [_passage(passage, index) for index, passage in enumerate(passages, 1)]
        kept = layout.fitting([(p.title, p.text) for p in numbered], reserve)
        text = layout.start() + "".join(layout.document(p.title, p.text) for p in numbered[:kept])
        s += text
        SaidTurns().begun(text, numbered[:kept]).keep(s)
        return Context(tuple(numbered[:kept]), tuple(numbered[kept:]))

    def answer(
        self, s: Any, question: str, name: str = "answer", *, max_tokens: int = 64, **options: Any
    ) -> None:
        """Append the question, and the answer as variable ``name``; greedy by default.

        ``options`` are those of ``sgl.gen``. Read the answer with `read`, or as ``s[name]``, which keeps the
        leading space of many models."""
        question = self._read(question)
        text = self._layout().question(question)
        self._generate(s, text, name, max_tokens, options)
        SaidTurns.of(s).asked(text, question, name, ()).keep(s)

    def follow_up(
        self,
        s: Any,
        question: str,
        name: str,
        passages: Iterable[RetrievedPassage | tuple[str, str]] = (),
        *,
        context: Context | None = None,
        session_budget: int | None = None,
        reserve: int = 256,
        max_tokens: int = 64,
        **options: Any,
    ) -> Context:
        """Append a further question after an answer, on the same documents; else like `answer`.

        The state is the session: all of it is found in the prefix cache. ``passages``, as `retrieve` finds
        them for the question, join those of ``context``, what `context`, `insert` or the last follow-up has
        returned: what is there already is not added twice, and the last ones are dropped as by `insert`.
        Returns the context with all passages in the state, numbered on.

        With ``session_budget`` the turns before the last one take at most so many tokens, as in a session
        of the server: their sentences that suit the question by words stay, chosen from all that the state
        has ever held, and the context says how much (``earlier``); 0 brings everything back. The state
        then waits for its last answer, and its text is replaced. Raises ``InvalidRequest`` for a state that
        holds other text than this class writes."""
        question = self._read(question)
        layout, before = self._layout(), () if context is None else context.passages
        asked = [_passage(passage, 0) for passage in passages]
        said, whole = SaidTurns.of(s), before
        earlier: tuple[EarlierTurn, ...] = ()
        if session_budget is not None:
            found = [(passage.title, passage.text) for passage in asked]
            said, shortened = said.shorten(s, layout, question, session_budget, found)
            before = tuple(_passage(passage, n) for n, passage in enumerate(shortened.passages, 1))
            whole = before[len(before) - shortened.whole :]
            earlier = tuple(shortened.report) if session_budget else ()
        known = {(passage.title, passage.text) for passage in whole}
        new = [passage for passage in asked if (passage.title, passage.text) not in known]
        added = [_passage(passage, index) for index, passage in enumerate(new, len(before) + 1)]
        texts = [(passage.title, passage.text) for passage in added]
        kept = layout.fitting_behind(s.text(), question, texts, reserve) if added else 0
        text = layout.follow_up(question, texts[:kept])
        self._generate(s, text, name, max_tokens, options)
        said.asked(text, question, name, added[:kept]).keep(s)
        return Context((*before, *added[:kept]), tuple(added[kept:]), earlier)

    def choose(self, s: Any, question: str, choices: Sequence[str], name: str = "choice") -> None:
        """Append the question and, as variable ``name``, the likeliest of ``choices`` (``sgl.select``)."""
        import sglang as sgl

        from ragserve.programs._sglang import whole_answer

        question = self._read(question)
        layout = self._layout()
        start, end = layout.answer_start(), layout.answer_end()
        text = layout.question(question)
        s += text
        s += sgl.select(
            name, choices=[start + choice + end for choice in choices], choices_method=whole_answer(end)
        )
        SaidTurns.of(s).asked(text, question, name, ()).keep(s)

    @staticmethod
    def read(s: Any, name: str) -> str:
        """Wait for a variable of the state and return it stripped. Raises the program's error, if any."""
        try:
            return str(s[name]).strip()
        except KeyError:
            # The interpreter runs in a separate thread and stores its error just before it ends.
            s.stream_executor.worker.join()
            error = s.error()
            if error is None:
                raise
            raise error from None

    def _generate(self, s: Any, text: str, name: str, max_tokens: int, options: dict[str, Any]) -> None:
        import sglang as sgl

        stop = options.pop("stop", ())
        stop = [stop] if isinstance(stop, str) else list(stop)
        s += text
        s += sgl.gen(
            name,
            max_tokens=max_tokens,
            stop=stop + list(self._layout().stop),
            **{"temperature": 0.0, **options},
        )

    def _read(self, question: str) -> str:
        """The question as the model is asked it."""
        with self._lock:
            return self._reads.get(question, question)

    def joint_namespace(self) -> str:
        """The name under which the server keeps prefixes: patterns in ``namespace`` stand for what they match
        now."""
        names = names_of(self.namespace)
        if not any(name.endswith("*") for name in names):
            return self.namespace
        known = [each.name for each in self._client.namespaces()]
        return joint_name(one for name in names for one in known if matches(one, name)) or self.namespace

    def _layout(self) -> PromptText:
        from ragserve.programs.prompt_text import PromptText

        with self._lock:
            if self._text is None:
                system = self._own_system() if self._system is None else self._system
                self._text = PromptText.of(self._client.info().model_dump(), self._tokenizer, system)
            return self._text

    def _own_system(self) -> str | None:
        """The system text that the namespace sets, or all of several alike. Raises InvalidRequest if they
        differ."""
        each: dict[str, NamespaceSettings] = {}
        for name in names_of(self.joint_namespace()):
            try:
                is_free = name.endswith("*")  # a pattern that matches none
                each[name] = NamespaceSettings.of({}) if is_free else self._client.namespace_settings(name)
            except NotFound:  # it need not exist for a program that brings its own passages
                each[name] = NamespaceSettings.of({})
        return NamespaceSettings.shared(each, NamespaceSettings.model_fields.keys() - {"system"}).system


def _must_be_empty(s: Any) -> None:
    if s.text():
        raise InvalidRequest(
            "The state already holds text, and documents come first in a prompt.",
            hint="Fork the state while it is empty (with s.copy() as hop:), and insert the documents there.",
        )


def _messages(history: Sequence[tuple[str, str]]) -> list[Turn]:
    turns: list[Turn] = []
    for question, answer in history:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _passage(passage: RetrievedPassage | tuple[str, str], index: int) -> RetrievedPassage:
    if isinstance(passage, RetrievedPassage):
        return passage.model_copy(update={"index": index})
    title, text = passage
    return RetrievedPassage.model_validate({"index": index, "title": title, "text": text})
