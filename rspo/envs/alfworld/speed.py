"""Games played fast: what TextWorld shows, at a hundredth of its cost.

TextWorld's environment for PDDL games translates the problem four times to start an episode and parses its grammar
again at every step. Here

- a game is translated once, without the translation that only a planner needs, and the result is kept (GAMES_KEPT),
- episodes of one game share one loaded library: a state is a number in it, so that a reset or a copy is an assignment
  (WORLDS_KEPT libraries stay loaded, about 9 MB each),
- commands, effects and sorted types are worked out once for each operator, texts by `rspo.envs.alfworld.game_text`.

Everything that can be seen is the same: observations, admissible commands and their order, facts, success.
"""

from __future__ import annotations

import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .game_text import (
    Context,
    Fact,
    Facts,
    Grammar,
    Placeholder,
    Rule,
    Subtypes,
    Symbol,
    Value,
    parse_grammar,
    predicates_of,
)
from .games import GameFile, Goal, read_game
from .upstream import GameError, alfworld, fast_downward, loading_library, textworld, translating

GAMES_KEPT = 4096
"""Translated games that are kept, of 20 to 100 KB each: all of the official ones for training, which are 3,553."""

WORLDS_KEPT = 32
"""Games that stay loaded when no episode plays them any more."""

STATES_LIMIT = 200_000
"""A loaded game remembers every state that was ever reached in it; past this many it is loaded again."""

NOTHING_HAPPENS = "Nothing happens."


@dataclass(frozen=True)
class Translation:
    """A game ready to be loaded.

    sas: the translated problem, compressed.
    parameters: of each action, as placeholders.
    types: of each object by name.
    type_parents: (name, supertypes) in the problem's order.
    facts: what the problem says at the start, in its order.
    changing: predicates that some action changes.
    """

    sas: bytes
    parameters: Mapping[str, tuple[Placeholder, ...]]
    types: Mapping[str, str]
    type_parents: tuple[tuple[str, tuple[str, ...]], ...]
    facts: tuple[Fact, ...]
    changing: frozenset[str]
    grammar: Grammar
    goal: Goal


def translate(game: GameFile) -> Translation:
    """Translate a game. Raises GameError where it cannot be."""
    try:
        grammar = parse_grammar(game.grammar)
        with translating():
            task, sas = fast_downward().pddl2sas(game.domain, game.problem, verbose=False)
        facts: list[Fact] = [
            (atom.predicate, tuple(atom.args))
            for atom in task.init
            if isinstance(atom, fast_downward().translate.pddl.conditions.Atom) and atom.predicate != "="
        ]
        return Translation(
            sas=zlib.compress(sas.encode(), 6),
            parameters={
                action.name: tuple((p.name.strip("?"), p.type_name) for p in action.parameters)
                for action in task.actions
            },
            types={thing.name: thing.type_name for thing in task.objects},
            type_parents=tuple((one.name, tuple(one.supertype_names)) for one in task.types),
            facts=tuple(facts),
            changing=frozenset(effect.literal.predicate for action in task.actions for effect in action.effects),
            grammar=grammar,
            goal=game.goal,
        )
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, GameError) else f"{type(error).__name__}: {error}"
        raise GameError(f"{game.path} is not a game that can be played: {said}") from error


def _subtypes(parents: tuple[tuple[str, tuple[str, ...]], ...]) -> Subtypes:
    logic = textworld("logic")
    hierarchy = logic.TypeHierarchy()
    for name, supertypes in parents:
        if name not in hierarchy._types:
            hierarchy.add(logic.Type(name, supertypes))
    known: dict[tuple[str, ...], list[tuple[str, ...]]] = {}

    def subtypes(types: tuple[str, ...]) -> list[tuple[str, ...]]:
        if types not in known:
            found = hierarchy.multi_subtypes([hierarchy.get(name) for name in types])
            known[types] = [tuple(one.name for one in combination) for combination in found]
        return known[types]

    return subtypes


@dataclass(frozen=True)
class Operator:
    """An action with its arguments.

    command: as the player types it; None where that depends on the state.
    """

    name: str
    template: list[Symbol]
    answer: list[Symbol]
    context: Context
    command: str | None


class World:
    """A game that is loaded: shared by the episodes that play it, which each hold their own state in it.

    opening: the text that it begins with.
    """

    def __init__(self, translation: Translation, library: Any) -> None:
        self.translation = translation
        self.library = library
        library.load_sas(zlib.decompress(translation.sas))
        self.start_state: int = library.get_state_id()
        changing = {name for predicate in translation.changing for name in (predicate, f"not_{predicate}")}
        self.start_facts = Facts(translation.types, _subtypes(translation.type_parents), frozenset(changing))
        for fact in translation.facts:
            self.start_facts.add(fact)
        atoms = (fast_downward().Atom * library.get_state_size())()
        library.get_state(atoms)
        for positive, fact in map(_read_atom, atoms):
            if positive:
                self.start_facts.add(fact)
        self.entities = _named_entities(self.start_facts, translation.types)
        self._operators: dict[int, Operator] = {}
        self.states = 0
        self._effects: dict[int, list[tuple[bool, Fact]]] = {}
        self._effect_counts: dict[int, int] = {}
        self.opening = self.derive([Rule("intro")], self.start_facts, Context())

    def derive(self, symbols: list[Symbol], facts: Facts, context: Context) -> str:
        """A text of the game's grammar."""
        return self.translation.grammar.derive(symbols, facts, self.entities, context)

    def valid(self, state: int, facts: Facts) -> list[tuple[str, int]]:
        """The commands that are valid in a state and the operators they stand for, in the library's order."""
        self.library.set_state_id(state)
        found = (fast_downward().Operator * self.library.get_applicable_operators_count())()
        self.library.get_applicable_operators(found)
        commands, seen = [], set()
        for one in found:
            operator = self._operators.get(one.id) or self._operator(one)
            if operator.name not in seen:
                seen.add(operator.name)
                command = operator.command
                if command is None:
                    command = self.derive(operator.template, facts, operator.context)
                commands.append((command, one.id))
        return commands

    def apply(self, number: int, state: int, facts: Facts) -> tuple[int, str]:
        """Apply an operator: the new state, and what is answered. Changes `facts`."""
        self.library.set_state_id(state)
        effects = self._effects.get(number)
        if effects is None:
            atoms = (fast_downward().Atom * self._effect_counts[number])()
            self.library.apply_operator(number, atoms)
            effects = self._effects[number] = [_read_atom(atom) for atom in atoms]
        else:
            self.library.apply_operator(number, None)
        for positive, (predicate, arguments) in effects:
            for is_true, name in ((positive, predicate), (not positive, f"not_{predicate}")):
                (facts.add if is_true else facts.discard)((name, arguments))
        operator = self._operators[number]
        try:
            answer = self.derive(operator.answer, facts, operator.context)
        except ValueError:  # TextWorld says so, whatever went wrong
            answer = NOTHING_HAPPENS
        new: int = self.library.get_state_id()
        self.states = max(self.states, new)
        return new, answer

    def is_won(self, state: int) -> bool:
        """Whether a state fulfils the goal."""
        self.library.set_state_id(state)
        return bool(self.library.check_goal())

    def _operator(self, found: Any) -> Operator:
        name: str = found.name
        action, *arguments = name.split()
        mapping: dict[Placeholder, Value] = {
            placeholder: (argument, placeholder[1])
            for placeholder, argument in zip(self.translation.parameters[action], arguments, strict=False)
        }
        context = Context({p: self.entities[argument] for (p, _), (argument, _) in mapping.items()}, mapping)
        template, answer = self.translation.grammar.actions[action]
        named = predicates_of(template)
        is_fixed = named is not None and named.isdisjoint(self.start_facts.changing)
        command = self.derive(template, self.start_facts, context) if is_fixed else None
        operator = self._operators[found.id] = Operator(name, template, answer, context, command)
        self._effect_counts[found.id] = int(found.nb_effect_atoms)
        return operator


def _read_atom(atom: Any) -> tuple[bool, Fact]:
    """Whether a library's atom says that a fact is true, and the fact."""
    kind, _, rest = atom.name.partition(" ")
    predicate, _, arguments = rest.rstrip(")").partition("(")
    return kind != "NegatedAtom", (predicate, tuple(arguments.split(", ")) if arguments else ())


def _named_entities(facts: Facts, types: Mapping[str, str]) -> dict[str, Any]:
    """What texts call the things of a game, as the alfworld package numbers them."""
    info = textworld("generator.game").EntityInfo
    names = {name for _, arguments in facts for name in arguments}
    entities = {name: info(name, types[name]) for name in names}
    demangler = alfworld("agents.utils.misc").Demangler(game_infos=entities)
    for entity in entities.values():
        entity.name = demangler.demangle_alfred_name(entity.id)
        entity.definite, entity.indefinite = "the", "a"
    return entities


# What is kept: translations and loaded worlds, by file

FileKey = tuple[str, int, int]
_translations: OrderedDict[FileKey, Translation] = OrderedDict()
_worlds: OrderedDict[FileKey, World] = OrderedDict()
_free_libraries: list[Any] = []


def _world(path: Path) -> World:
    """The loaded world of a game. Raises GameError where it cannot be loaded."""
    try:
        status = path.stat()
    except OSError as error:
        raise GameError(f"{path} is not a game that can be played: {error}") from error
    key = (str(path), status.st_size, status.st_mtime_ns)
    world = _worlds.get(key)
    if world is None or world.states > STATES_LIMIT:
        translation = _translations.get(key)
        if translation is None:
            translation = _translations[key] = translate(read_game(path))
        _worlds.pop(key, None)
        world = _worlds[key] = _loaded(translation, path)
        _translations.move_to_end(key)
    _worlds.move_to_end(key)
    for kept, limit in ((_worlds, WORLDS_KEPT), (_translations, GAMES_KEPT)):
        while len(kept) > limit:
            kept.popitem(last=False)
    return world


def _loaded(translation: Translation, path: Path) -> World:
    """A game in a library of its own, which is free for the next when no one needs the world any more.

    Raises GameError where the game does not make sense, e.g. a goal that no action can bring about, ResourceError where
    the library cannot be loaded.
    """
    with loading_library():
        library = _free_libraries.pop() if _free_libraries else fast_downward().load_lib()
    try:
        world = World(translation, library)
    except Exception as error:
        _free_libraries.append(library)
        raise GameError(f"{path} is not a game that can be played: {type(error).__name__}: {error}") from error
    weakref.finalize(world, _free_libraries.append, library).atexit = False
    return world


class FastGame:
    """A game under way; see `plain.PlainGame` for the members."""

    observation: str
    commands: list[str]
    won: bool
    _valid: list[tuple[str, int]]

    def __init__(self, path: Path) -> None:
        self._begin(_world(path))

    @classmethod
    def of(cls, game: GameFile) -> FastGame:
        """A game that is in no file. Raises GameError where it cannot be loaded."""
        new = cls.__new__(cls)
        new._begin(_loaded(translate(game), game.path))
        return new

    def _begin(self, world: World) -> None:
        self._world = world
        self.goal = self._world.translation.goal
        self._state = self._world.start_state
        self._facts = self._world.start_facts.copy()
        self._look(self._world.opening)

    def act(self, command: str) -> bool:
        number = dict(reversed(self._valid)).get(command.strip())
        if number is None:
            self.observation = NOTHING_HAPPENS
            return False
        self._state, answer = self._world.apply(number, self._state, self._facts)
        self._look(answer)
        return True

    def facts(self, *predicates: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        entities = self._world.entities
        for predicate, arguments in self._facts.of(*predicates) if predicates else self._facts:
            yield predicate, tuple([entities[argument].name for argument in arguments])

    def copy(self) -> FastGame:
        new = FastGame.__new__(FastGame)
        new.__dict__.update(self.__dict__, _facts=self._facts.copy())
        return new

    def close(self) -> None:
        """Nothing to do: what is loaded is kept for the next episode."""

    def _look(self, answer: str) -> None:
        self.observation = answer
        self._valid = self._world.valid(self._state, self._facts)
        self.commands = sorted({command for command, _ in self._valid})
        self.won = self._world.is_won(self._state)
