"""Programming and data languages by file extension."""

from __future__ import annotations

_EXTENSIONS = {
    "assembly": ".asm .s",
    "batch": ".bat",
    "c": ".c .h",
    "clojure": ".clj",
    "cpp": ".cc .cpp .cxx .hpp .hh",
    "csharp": ".cs",
    "cuda": ".cu .cuh",
    "elixir": ".ex .exs",
    "erlang": ".erl",
    "fortran": ".f90",
    "groovy": ".groovy .gradle",
    "handlebars": ".hbs",
    "haskell": ".hs",
    "ini": ".ini .cfg",
    "javascript": ".js .mjs .cjs .jsx",
    "jinja": ".jinja .j2",
    "json": ".ipynb .json",
    "julia": ".jl",
    "kotlin": ".kt",
    "latex": ".tex",
    "lisp": ".el .lisp",
    "objective-c": ".m",
    "ocaml": ".ml",
    "perl": ".pl .pm",
    "powershell": ".ps1",
    "protobuf": ".proto",
    "python": ".py .pyi",
    "ruby": ".rb",
    "rust": ".rs",
    "shell": ".sh .bash .zsh .fish",
    "template": ".tmpl",
    "terraform": ".tf",
    "typescript": ".ts .tsx",
    "yaml": ".yaml .yml",
}
# languages whose extension is their name
_SAME = (
    "cmake css dart ejs erb go java jsp lua mustache php r scala scss sql svelte swift toml vim vue xml zig"
)

LANGUAGES = {ext: language for language, exts in _EXTENSIONS.items() for ext in exts.split()}
LANGUAGES |= {f".{name}": name for name in _SAME.split()}
