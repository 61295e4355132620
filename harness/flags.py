"""One flag, one row: parser, --help, YAML keys, names of folders, and what a resume, --sample, --diagnose and
--finetune accept are derived from it.

    kind       in the folder's name    when the run goes on     beside --sample
    result     yes                     fixed                    fixed
    draw       yes                     fixed                    may differ
    extent     yes                     may differ               fixed
    place      by its tail             may move                 fixed
    code       by its tail             may move                 may move
    machine    no                      may differ               fixed

`may` names what else a single flag may do. Values are read as attributes of a `Config`: c.lr.
"""

import argparse
import difflib
import hashlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from types import SimpleNamespace

from harness import names
from harness.files import bytes_of_file
from harness.ranks import speaks_first
from lowprec.errors import Refused

FLAG_KINDS = ("result", "draw", "extent", "place", "code", "machine")
FLAG_GROUPS = {  # in the order of --help and of names
    "task": None,
    "training": None,
    "precision": "without a flag: fp32 everywhere",
    "generation": None,
    "machine": None,
    "run": None,
}


# ---- Rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """One flag.

    default: False makes a switch, a list makes a flag that may be repeated. type: converts the text, and
    raises ValueError or argparse.ArgumentTypeError for what it can't take. may: of "resume", "sample" and
    "diagnose", beside what `kind` allows. often: whether most runs need it, so that --help shows it. titled:
    whether the flag's own name precedes its value in the folder's name, as numbers always have it. fits:
    whether weights fit only runs with the same value, so that --finetune and --teacher compare it. to: who
    takes it as a keyword of the same name, "recipe", "method" or "scaler". needs: the flag without which it
    does nothing. of_steps: how a value that is not the default depends on --steps, which then can't change.
    """

    name: str
    default: object
    help: str
    group: str = "task"
    kind: str = "result"
    type: object = str
    choices: tuple | None = None
    metavar: str | None = None
    may: tuple = ()
    often: bool = False
    titled: bool = False
    fits: bool = False
    to: str = ""
    needs: str = ""
    of_steps: str = ""

    def __post_init__(self):
        if self.kind not in FLAG_KINDS or self.group not in FLAG_GROUPS:
            groups = tuple(FLAG_GROUPS)
            raise ValueError(f"flag {self.name}: kind is one of {FLAG_KINDS}, group one of {groups}")

    def accepts(self, verb):
        """Whether the flag may differ from the run's when it goes on ("resume"), or beside --sample or
        --diagnose.
        """
        kinds = {"resume": ("extent", "machine"), "sample": ("draw", "code"), "diagnose": ("code",)}
        return self.kind in kinds[verb] or verb in self.may

    def comparable(self, value):
        """The part of a value that is compared and named: of a place its tail, 'folder:/a/photos/' ->
        'folder:photos'.
        """
        if self.kind not in ("place", "code") or not value:
            return value
        return ":".join(map(_last_part, value.removesuffix("checkpoint.pt").split(":", 1)))

    def named(self, value):
        """The parts of a folder's name that a value makes: [] for the default."""
        if self.kind == "machine" or value == self.default:
            return []
        if value is True:
            return [self.name]
        if isinstance(value, list):
            return value
        if not isinstance(value, str):
            return [f"{self.name}{value:g}"]
        value = self.comparable(value)
        if self.titled:
            return [f"{self.name}_{value}"]
        return [value]

    def add_to(self, group):
        """Add the flag to a group of an argparse parser."""
        text = self.help.replace("%", "%%")
        says_nothing = self.default is False or self.default in (None, [], "")
        if not says_nothing and "(default:" not in text:
            text += f" (default: {self.default})"
        name = f"--{self.name}"
        if self.default is False:
            group.add_argument(name, help=text, action="store_true")
        elif isinstance(self.default, list):
            group.add_argument(name, help=text, action="append", metavar=self.metavar)
        else:
            metavar = self.metavar
            if metavar is None and self.choices is None and not isinstance(self.default, str):
                metavar = None if self.type is str else "N"
            options = dict(type=self.type, choices=self.choices, metavar=metavar)
            group.add_argument(name, help=text, **options)


class Config(SimpleNamespace):
    """The values of all flags, as attributes. `vars(config)` is the plain dict that files hold."""

    def replaced(self, **values):
        """A copy with some values changed."""
        return type(self)(**{**vars(self), **values})


# ---- Types -------------------------------------------------------------------------------------------------


def checked(kind, test, what):
    """A type: text converted by `kind` to a value that passes `test`, or an error that says it is not
    `what`.
    """

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not test(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


# Beyond these a flag is a slip of the finger, and ends in a loop that does not end, in memory that is not
# there, or in a number that a tensor does not take
LARGEST_WHOLE = 2**31 - 1
LARGEST_REAL = 3e38  # of fp32
TEN_MILLION = 10**7  # things that are made at once
natural = checked(int, lambda v: 0 < v <= LARGEST_WHOLE, f"a whole number above 0, up to {LARGEST_WHOLE}")
count = checked(int, lambda v: 0 <= v <= LARGEST_WHOLE, f"a whole number, 0 or more, up to {LARGEST_WHOLE}")
several = checked(int, lambda v: 1 < v <= TEN_MILLION, f"a whole number above 1, up to {TEN_MILLION}")
crowd = checked(int, lambda v: 0 < v <= TEN_MILLION, f"a whole number above 0, up to {TEN_MILLION}")
crowd_or_auto = checked(
    lambda text: text if text == "auto" else int(text),
    lambda v: v == "auto" or 0 < v <= TEN_MILLION,
    f"a whole number above 0, up to {TEN_MILLION}, or auto",
)
side = checked(int, lambda v: 8 <= v <= LARGEST_WHOLE, f"a whole number from 8 to {LARGEST_WHOLE}")
thousand = checked(int, lambda v: 0 < v <= 1000, "a whole number from 1 to 1000")
few = checked(int, lambda v: 0 <= v <= 1000, "a whole number from 0 to 1000")
seed = checked(int, lambda v: 0 <= v < 2**63, "a whole number, 0 or more, below 2**63")
positive = checked(float, lambda v: 0 < v <= LARGEST_REAL, f"a number above 0, up to {LARGEST_REAL:g}")
amount = checked(float, lambda v: 0 <= v <= LARGEST_REAL, f"a number, 0 or more, up to {LARGEST_REAL:g}")
share = checked(float, lambda v: 0 <= v <= 1, "a number from 0 to 1")
fraction = checked(float, lambda v: 0 <= v < 1, "a number from 0 to below 1")


def of_size(net, size, sizes):
    """What a net of this --size is built of. sizes: {--size: that}."""
    if size not in sizes:
        instead = f"choose one of {', '.join(sizes)}" if sizes else "it has one: drop --size"
        raise Refused(f"unknown size {size!r} for {net}; {instead}")
    return sizes[size]


def _last_part(place):
    """The last part of a path; of the best checkpoint of a run with the run's, since all have that name."""
    folder, name = os.path.split(os.path.normpath(place))
    if name == "best.pt":
        return os.path.join(os.path.basename(folder), name)
    return name


def _inside(name):
    """Whether a name is that of a folder below another one, and one that any file system takes."""
    parts = name.split("/")
    plain = name.isprintable() and all(part not in ("", ".", "..") for part in parts)
    return not name or (plain and len(os.fsencode(name)) <= 200)


path = checked(str, lambda v: v and "\0" not in v, "a path")
inner = checked(str, _inside, "a name of at most 200 printable bytes, without / at its ends and without ..")


# ---- The table ---------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line. elsewhere: {flag: what is said of it}, of flags that it has not."""

    elsewhere = {}

    def print_help(self, file=None):
        try:
            print(self.format_help(), end="", file=file, flush=True)
        except BrokenPipeError:  # as after `| head`
            pass
        except OSError as error:  # which argparse's own hides
            self.error(f"can't print: {error.strerror}")

    def error(self, message):
        if message.startswith("unrecognized arguments: --"):
            word = message.partition(": ")[2].split()[0].partition("=")[0]
            message = self.elsewhere.get(word.removeprefix("--")) or message + self._near(word)
        line = f"{self.prog}: {Refused(message)} (see {self.prog} --help)"
        if speaks_first():
            print(line, file=sys.stderr)
        ended = SystemExit(2)
        ended.line = line
        raise ended

    def _near(self, word):
        own = {option.removeprefix("--") for option in self._option_string_actions}
        near = near_name(word.removeprefix("--"), own | set(self.elsewhere))
        return f"; near it is --{near}" if near else ""

    def _get_values(self, action, words):
        if action.option_strings and "--" in words:  # of --flag=--, which argparse takes for an empty list
            raise argparse.ArgumentError(action, "'--' is no value")
        return super()._get_values(action, words)


def near_name(name, known):
    """The one of `known`, and of other programs' names for our flags, that a misspelt name is nearest to, or
    None.
    """
    near = difflib.get_close_matches(names.plain(name), {*known, *names.NAMES}, 1)
    return near[0] if near else None


class FlagParser(OneLineParser):
    """The parser of a FlagTable. --help shows what most runs need; --help GROUP that group, --help all all.
    often, own: names of the flags that --help alone shows, those that most runs need and, behind --task, the
    task's own.
    """

    def __init__(self, often, own, **options):
        super().__init__(add_help=False, usage="%(prog)s [--FLAG VALUE] ...", **options)
        self.brief = {"what most runs need": often, "this task's own": own}
        self.topic = None

    def parse_known_args(self, args, namespace=None):
        return super().parse_known_args(self._in_our_words(args), namespace)

    def _in_our_words(self, words):
        """Words of a command, with our flags for those that other programs have."""
        found, theirs = [], {}
        rest = list(words)
        while rest:
            word = rest.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            is_flag = word.startswith("--") or (equals and name.partition(".")[0] in names.SECTIONS)
            own = names.plain(name)
            if not is_flag or f"--{name}" in self._option_string_actions:
                found.append(word)
            elif f"--{own}" in self._option_string_actions:
                found.append(f"--{own}{equals}{value}")
            elif names.is_known(own):
                if not equals:
                    value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
                theirs[own] = value
            else:
                found.append(word)
        return found + self.words_of(theirs)

    def words_of(self, theirs, source=""):
        """Our words for {other programs' name: its value as a text}; an error of the parser where there are
        none.
        """
        try:
            ours = names.in_our_words(theirs)
        except ValueError as error:
            self.error(f"{source}{error}")
        return [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in ours.items()]

    def format_help(self):
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        if self.topic is None:
            formatter.add_text(self.description)
            for title, names in self.brief.items():
                self._add_section(formatter, title, [one for one in self._actions if one.dest in names])
        for group in self._action_groups:
            if self.topic in ("all", group.title):
                self._add_section(formatter, group.title, group._group_actions)
        formatter.add_text(self.epilog)
        return formatter.format_help()

    @staticmethod
    def _add_section(formatter, title, actions):
        formatter.start_section(title)
        formatter.add_arguments(actions)  # of a section without any nothing is printed
        formatter.end_section()


class ShowHelp(argparse.Action):
    """--help, --help GROUP or --help all. `task` is in the namespace where it was typed."""

    def __call__(self, parser, namespace, topic, option_string=None):
        parser.topic = topic
        if "task" not in namespace:
            del parser.brief["this task's own"]
        parser.print_help()
        parser.exit()


def _wide(prog):
    """The shape of --help: two columns, in lines of at most 110 characters."""
    width = min(110, shutil.get_terminal_size().columns)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=27, width=width)


class FlagTable:
    """All flags of one run. rows: Flags in any order; of two with one name the later replaces the earlier.
    own: names of those that its task brings. elsewhere: {flag: what is said of it} of flags that other tasks'
    runs have.
    """

    def __init__(self, rows, own=(), elsewhere=()):
        self.own, self.elsewhere = tuple(own), dict(elsewhere)
        by_name = {}
        for row in rows:
            by_name[row.name] = row
        groups = list(FLAG_GROUPS)
        self.rows = sorted(by_name.values(), key=lambda row: groups.index(row.group))

    def __getitem__(self, name):
        return next(row for row in self.rows if row.name == name)

    def __contains__(self, name):
        return any(row.name == name for row in self.rows)

    def defaults(self):
        """{flag: default}, in the order of names."""
        found = {row.name: row.default for row in self.rows}
        for name, value in found.items():
            if isinstance(value, list):
                found[name] = list(value)  # a run may add to its own
        return found

    def typed(self, given):
        """A Config of the flags that were typed, {flag: value}, and the defaults of the others."""
        return Config(**{**self.defaults(), **given})

    def config(self, values):
        """A Config of {flag: value} as a run's files hold it. Files older than a flag have its default, and
        what they say of other tasks' flags is left out.
        """
        config = self.typed({row.name: values[row.name] for row in self.rows if row.name in values})
        if values.get("weight_decay") and "weight_decay_on" not in values:
            config.weight_decay_on = "all"  # what runs did before that flag
        return config

    def obeyed(self, values):
        """A Config of the flags in a checkpoint, which may be a stranger's, that a command on it obeys.

        Those that say what was trained, on which data and how it is scored: without them the weights mean
        nothing. Not those of kind machine, which change no result: where files are written, how many threads
        and images at once, are matters of whoever types the command, or else the defaults. A path of data is
        obeyed, since a run's own scores need it; files are read there as `data` reads them, and nothing is
        run. What names a file of code is obeyed where it was typed as well, see code.py.
        """
        names = [row.name for row in self.rows if row.kind != "machine" and row.name in values]
        return self.config({name: values[name] for name in names})

    def shared(self, config):
        """{flag: value} of the flags that all processes of a run must share."""
        names = [row.name for row in self.rows if row.kind != "machine"]
        return {name: getattr(config, name) for name in [*names, "fsdp"]}

    def pick(self, config, to):
        """{flag: value} of the flags that go `to` "recipe", "method" or "scaler" as keywords."""
        return {row.name: getattr(config, row.name) for row in self.rows if row.to == to}

    # -- reading

    def parser(self, prog, description, shown=()):
        """A FlagParser that gives the flags typed, and no defaults. Bad input ends with one line and status
        2. shown: what --help shows beside the flags that most runs need and the task's own.
        """
        often = [row.name for row in self.rows if row.often]
        parser = FlagParser(
            [*often, "help", *shown],
            [name for name in self.own if name not in often],
            prog=prog,
            description=description,
            epilog="all flags: --help all; those of a task: --task TASK --help; those of one group: --help "
            + ", ".join(FLAG_GROUPS),
            formatter_class=_wide,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,  # a new flag would change what an abbreviation means
        )
        parser.elsewhere = self.elsewhere
        topics = ("all", *FLAG_GROUPS)
        says = dict(
            nargs="?", choices=topics, metavar="GROUP", help="what most runs need, or what GROUP holds"
        )
        parser.add_argument("-h", "--help", action=ShowHelp, **says)
        for title, text in FLAG_GROUPS.items():
            group = parser.add_argument_group(title, text)
            for row in self.rows:
                if row.group == title:
                    row.add_to(group)
        return parser

    def read_yaml(self, path, parser):
        """{flag: value} of a YAML file, converted and checked as if typed. An unknown key is an error of
        the parser.
        """
        words, theirs = [], {}
        for key, value in _without_sections(read_yaml(path, parser)):
            name = names.plain(key)
            if name in self.elsewhere:
                parser.error(f"--config {path}: {self.elsewhere[name]}")
            if name not in self and not names.is_known(name):
                near = near_name(name, [row.name for row in self.rows])
                hint = f"; near it is {near}" if near else ""
                keys = f"the keys are the flags of {parser.prog} without their dashes{hint}"
                parser.error(f"--config {path}: unknown key '{key}'; {keys}")
            if value is None:  # 'data:' with nothing after it
                continue
            if name in self:
                words += _words_of_yaml(self[name], value, path, parser)
            else:
                theirs[name] = str(value)
        return vars(parser.parse_args(words + parser.words_of(theirs, f"--config {path}: ")))

    # -- comparing

    def name(self, config, unlike=False):
        """A folder's name, of the flags that differ from their defaults: 'pure_bf16-stochastic', 'default'.

        unlike: whether it ends with a hash of the values where it can't show all of them, so that two of them
        never have one name.
        """
        parts = []
        for row in self.rows:
            parts += row.named(getattr(config, row.name))
        shown = [re.sub(r"[^A-Za-z0-9._+-]+", "_", part).strip("_") for part in parts]
        name = "-".join(shown)
        if unlike:
            whole = shown == [part.replace("=", "_") for part in parts]
            if not whole or len(name) > 200:
                digest = hashlib.sha256(repr(parts).encode()).hexdigest()
                return f"{name[:190]}-{digest[:8]}".lstrip("-")
        return name[:200] or "default"

    def fixed(self, config):
        """{flag: what is compared} of the flags that can't change when a run goes on."""
        names = [row.name for row in self.rows if not row.accepts("resume")]
        if self._of_steps(config):
            names.append("steps")
        return {name: self[name].comparable(getattr(config, name)) for name in names}

    def differences(self, old, config):
        """['--lr was 0.001 and is 0.0001', ...]: what keeps the run of `old` (a dict) from going on as
        `config`.
        """
        before = self.config(old)
        then, now = self.fixed(before), self.fixed(config)
        texts = []
        for name, value in now.items():
            if then.get(name, getattr(before, name)) != value:
                texts.append(f"--{name} was {getattr(before, name)} and is {getattr(config, name)}")
                if name == "steps":
                    texts += self._of_steps(config)
        return texts

    def _of_steps(self, config):
        """['--lr_schedule cosine ends at --steps', ...]"""
        found = []
        for row in self.rows:
            value = getattr(config, row.name)
            if row.of_steps and value != row.default:
                shown = value if isinstance(value, str) else f"{value:g}"
                found.append(f"--{row.name} {shown} {row.of_steps}")
        return found

    def scored_alike(self, old, config):
        """Whether the run of `old` (a dict) was scored as that of `config` is to be."""
        before = self.config(old)
        scoring = [row.name for row in self.rows if row.kind == "extent" and row.name != "steps"]
        return all(getattr(before, name) == getattr(config, name) for name in scoring)

    def check_given(self, given, verb, trained):
        """Raise Refused for one of the flags `given` that can't differ from the run's beside --sample or
        --diagnose. trained: {flag: value} of the run.
        """
        for name in sorted(given):
            row = self[name]
            its = row.comparable(trained.get(name, row.default))
            moved = row.kind == "code" and row.comparable(given[name]) != its
            if moved or not row.accepts(verb):
                raise Refused(f"--{verb} takes a run as it was trained: --{name} can't differ; drop it")

    def fitting(self):
        """Rows of the flags that must be alike in two runs for the weights of one to fit the other."""
        return [row for row in self.rows if row.fits]


def check_none(idle, beside, instead="drop it"):
    """Raise Refused for the first of the flags that are `idle` beside what is named."""
    for name in idle:
        raise Refused(f"--{name} changes nothing beside {beside}: {instead}")


def _without_sections(values):
    """(key, value) of a YAML file, with those in `trainer` and other sections by themselves."""
    for key, value in values.items():
        if key in names.SECTIONS and isinstance(value, dict):
            for inner, its in value.items():
                yield f"{key}.{inner}", its
        else:
            yield key, value


YAML_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _words_of_yaml(row, value, path, parser):
    """The words of a command that say what a YAML file says of a flag: its row, its value there."""
    if isinstance(row.default, bool):
        if str(value).lower() not in YAML_SWITCHES:
            parser.error(f"--config {path}: {row.name} is true or false, not {value!r}")
        if YAML_SWITCHES[str(value).lower()]:
            return [f"--{row.name}"]
        return []
    if isinstance(row.default, list):
        return [f"--{row.name}={item}" for item in _items_of_yaml(value)]
    if isinstance(value, (dict, list)):
        what = "mapping" if isinstance(value, dict) else "list"
        parser.error(f"--config {path}: {row.name} is one value, not a {what}")
    return [f"--{row.name}={value}"]


def _items_of_yaml(value):
    """The values of a flag that may be repeated: {ema: bf16, kahan: true} -> ['ema=bf16', 'kahan=on']."""
    if isinstance(value, dict):
        switches = {"true": "on", "false": "off"}
        return [f"{name}={switches.get(str(one), one)}" for name, one in value.items()]
    if isinstance(value, list):
        return value
    return [value]


def read_yaml(path, parser):
    """The mapping in a YAML file, its values as they stand there, texts; anything else is an error of the
    parser.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that stands twice, of which YAML's own takes the last. A value is what its flag makes
        of the text: YAML's own reading of 12:30 is 750, and that of yes is true.
        """

        yaml_implicit_resolvers = {}

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in seen:
                    raise yaml.YAMLError(f"the key '{key.value}' stands there twice")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items():
        kept = [(tag, form) for tag, form in forms if tag.endswith((":null", ":merge"))]
        Loader.yaml_implicit_resolvers[first] = kept

    content = bytes_of_file(path)
    if len(content) > TEN_MILLION:
        parser.error(f"--config {path} is too large for a YAML file")
    try:
        values = yaml.load(content, Loader) or {}
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        why = " ".join(str(error).split())
        parser.error(f"--config {path} is not YAML: {why[:500]}")
    if not isinstance(values, dict):
        parser.error(f"--config {path}: expected lines 'flag: value'")
    return values
