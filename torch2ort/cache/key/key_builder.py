"""Named components of a model, written down piece by piece until nothing reachable is left.

A *component* is one thing that can change by itself: the code of a function, a class, a module's
attributes, a global variable. Its content consists of plain values and of references to other components
and objects, none of which contains an address. ``ObjectEncoder`` and ``Definitions`` write the content; this
module keeps the books.

A component is reachable if another one refers to it. A method counts once any code reads its name, and so
does an attribute that is not a plain value. So the walk covers at least the code that can run.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch2ort.cache.key.constant_bytes import atom, form
from torch2ort.cache.key.guards import GuardList
from torch2ort.cache.key.packages import Package, package_of_class


class Unkeyable(Exception):  # noqa: N818 - the answer to a question, not an error
    """A model cannot be keyed; the message is the reason, a sentence without an end stop."""


Fill = Callable[[], "str | None"]
# Separator between a digest and the plain attributes behind it.
NOTE = "; "
LONGEST_NOTE = 40


class ComponentOwner(enum.Enum):
    """Owner of a component, which determines whether its code may read attributes of a user's Function."""

    MODEL = "read while a model is exported"
    FUNCTION = "of a Function, whose code runs for real in each call of a graph"
    CONTAINERS = "code that gets only objects of certain classes, so no Function, and neither do its callees"
    TORCH = "code of torch, which reads no attribute of a user's Function; the code that it calls may"


@dataclass(slots=True, eq=False)
class Component:
    """A component that is still to be written.

    Attributes:
        label: the component's name.
        fill: writes the content, or returns a text that represents it exactly.
        own: True if the component is the user's; of a package's code, only what is read by name counts.
        via: names of attributes, one of which must be read for the component to count; ``None``: it counts.
        attribute: the name of the attribute whose value it is, if it is one.
        owner: owner of the component.
        done: True once it was written.
        refers: the components that it refers to.
        names: the attribute names that it reads; ``None`` if it may read any.
    """

    label: str
    fill: Fill
    own: bool
    via: set[str] | None
    attribute: str | None = None
    owner: ComponentOwner = ComponentOwner.MODEL
    done: bool = False
    refers: set[Component] = field(default_factory=set)
    names: set[str] | None = field(default_factory=set)


@dataclass(slots=True)
class _DeferredAttribute:
    """An attribute that was not written, and does not count until some code reads its name.

    Attributes:
        name: name of the attribute.
        label: name of the component that contains it.
        write: writes the value.
        read: True if some code reads the name.
        found_by: the component that refers to it.
    """

    name: str
    label: str
    write: Callable[[], None]
    found_by: Component
    read: bool = False


CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__"})


def constructor_of(cls: type) -> str:
    """Return the name that counts as read where a class is called: many constructors read ``__init__``."""
    return f"constructor of {id(cls)}"


class Walk:
    """The components found so far, and those that are still to be written.

    Args:
        weights: id of each parameter and buffer of the model -> its name.
        modules: id of each module of the model -> its path.
        inlines_functions: whether the code of every Function is part of the graph, as that of modules is.

    Attributes:
        components: name -> sha256 of its content and its plain attributes, or the content itself if it is
            readable; in an order that depends on the model alone.
        names: every attribute name that reached code reads.
        any_name: True if reached code may read attributes of any name.
        functions: the Functions found, by qualified name, in the order found.
        topics: facts about the process that the code asks torch for: ``"ranks"``, ``"devices"``.
        guards: the places of all that was found, to be compared later in this process.
        contents: large tensors and arrays, each with the component that it was found in. A key contains the
            digest of their elements; within a process their identity and version identify them.
        refusals: reasons why the components cannot distinguish two processes; empty if they can. A value that
            cannot be written is pinned by its identity, for this process.
        unseen: reasons why they and the guards are not enough in this process either; empty if they are.
        is_partial: True if another walk can find more once the code has run.
        asks_types: True if code asks for the exact type of a value, which a subclass does not have.
        asks_parameters: True if the user's code names ``torch.nn.Parameter``, so it may ask which tensors
            are parameters.
    """

    def __init__(
        self,
        weights: dict[int, str],
        modules: dict[int, str],
        *,
        inlines_functions: bool = False,
    ) -> None:
        self.inlines_functions = inlines_functions
        self.weights = weights
        self.modules = modules
        self.components: dict[str, str] = {}
        self.names: set[str] = set()
        self.any_name = False
        self.functions: defaultdict[str, list[type]] = defaultdict(list)
        self.topics: set[str] = set()
        self.guards = GuardList()
        self.contents: list[tuple[Component, Any]] = []
        # Places outside of all components are attributed to this one.
        self._component = self._top = self.guards.finder = Component("", lambda: None, False, None)
        self.refusals: list[str] = []
        self.unseen: list[str] = []
        self.is_partial = False
        self.asks_types = False
        self.asks_parameters = False
        self._attempts = 0
        self._out = bytearray()
        self._notes: list[str] = []
        self._memo: dict[int, tuple[bytes, Component]] = {}
        self._kept: list[Any] = []
        self._components: list[Component] = []
        self._component_of: dict[Hashable, Component] = {}
        self._taken: dict[str, int] = {}
        self._unread: list[_DeferredAttribute] = []
        self._once: dict[Hashable, None] = {}
        self._packages: dict[int, tuple[type, Package | None]] = {}

    @property
    def place(self) -> str:
        """Name of the component that is being written, for people."""
        return self._component.label

    def write(self, data: bytes) -> None:
        """Add bytes to the present component."""
        self._out += data

    def note(self, name: str, value: Any) -> None:
        """Add a plain attribute to the readable part of the present component."""
        text = repr(value)
        if len(text) <= LONGEST_NOTE and NOTE not in text:
            self._notes.append(f"{NOTE}{name} = {text}")

    def atom(self, value: Any) -> None:
        """Add a plain value to the present component."""
        data = atom(value)
        assert data is not None, f"{value!r} is not plain"
        self._out += data

    def write_reference(self, value: Any) -> bool:
        """Write a reference to ``value`` and return True if it was met before; otherwise record its place."""
        met = self._memo.get(id(value))
        if met is not None:
            place, component = met
            self._out += place
            self._component.refers.add(component)
            return True
        place = form(b"@", b"%d %s" % (len(self._out), self._component.label.encode()))
        self._memo[id(value)] = place, self._component
        self._kept.append(value)  # so that no other object gets its id
        return False

    def attempt(self, write_value: Callable[[], None]) -> str | None:
        """Write a value, or nothing and return the reason if that is impossible."""
        written, kept, jobs, once = len(self._out), len(self._kept), len(self._components), len(self._once)
        self._attempts += 1
        try:
            write_value()
        except Unkeyable as reason:
            del self._out[written:]
            for value in self._kept[kept:]:
                del self._memo[id(value)]
            del self._kept[kept:]
            dropped = set(map(id, self._components[jobs:]))
            self._component_of = {
                key: component
                for key, component in self._component_of.items()
                if id(component) not in dropped
            }
            del self._components[jobs:]
            for key in list(self._once)[once:]:
                del self._once[key]
            return str(reason)
        finally:
            self._attempts -= 1
        return None

    def refuse(self, reason: str, value: Any = None) -> None:
        """Note that ``value`` cannot be compared between processes; in this one its identity is compared.

        Raises:
            Unkeyable: inside of :meth:`attempt`, which discards the data that it has written.
        """
        if self._attempts:
            raise Unkeyable(reason)
        self.refusals.append(f"{self._component.label}: {reason}" if self._component.label else reason)
        self.guards.pin(value)

    def refuse_unseen(self, reason: str, value: Any = None) -> None:
        """Note that a change of ``value`` cannot be detected, in this process either."""
        self.note_unseen(reason)
        self.refuse(reason, value)

    def note_unseen(self, reason: str) -> None:
        """Note that a change of a value cannot be detected in this process."""
        if not self._attempts:
            self.unseen.append(f"{self.place}: {reason}")

    def content(self, value: Any) -> None:
        """Make the elements of a large tensor or array part of the key."""
        self.contents.append((self._component, value))

    def check(self, rule: Callable[..., None], *arguments: Any) -> None:
        """Call ``rule``, and refuse the last argument if that raises :class:`Unkeyable`."""
        try:
            rule(*arguments)
        except Unkeyable as reason:
            self.refuse(str(reason), arguments[-1])

    def attribute(self, name: str, write_value: Callable[[], None]) -> None:
        """Write an attribute's name; its value is written once code reads ``name``, or when a key is made."""
        self.atom(name)
        self._unread.append(_DeferredAttribute(name, self._component.label, write_value, self._component))

    def reads(self, names: Collection[str], *, any_name: bool = False) -> None:
        """Note the attribute names that the present component reads."""
        self.names.update(names)
        self.any_name = self.any_name or any_name
        if any_name:
            self._component.names = None
        elif self._component.names is not None:
            self._component.names.update(names)

    def calls(self, cls: type) -> None:
        """Note that the present component may call a class, and its constructor and those of its bases."""
        self.reads([constructor_of(base) for base in cls.__mro__])

    def refer(
        self,
        label: str,
        identity: Hashable,
        fill: Fill,
        *,
        own: bool = True,
        via: str | None = None,
        attribute: str | None = None,
        owner: ComponentOwner = ComponentOwner.MODEL,
    ) -> None:
        """Write a reference to the component of ``identity``, and add that component to the walk.

        Args:
            label: the component's name; ``#2`` is added for a second identity of that name.
            identity: a value that is the same for the same object throughout the walk.
            fill: writes the component's content, or returns a text that represents it exactly.
            own: True if the component is the user's. Other code is only inspected: no reference is written,
                and there is no component if nothing is written.
            via: name of the attribute that must be read for the component to count; ``None``: it counts.
            attribute: name of the Function's attribute that it is.
            owner: owner of the component.
        """
        component = self._component_of.get(identity)
        if component is None:
            component = Component(self._unique_label(label), fill, own, set(), attribute, owner)
            self._component_of[identity] = component
            self._components.append(component)
        self._component.refers.add(component)
        if via is None:
            component.via = None
        elif component.via is not None:
            component.via.add(via)
        if own:
            self.write(form(b"&", component.label.encode()))

    def _unique_label(self, label: str) -> str:
        number = self._taken[label] = self._taken.get(label, 0) + 1
        return label if number == 1 else f"{label}#{number}"

    def once(self, key: Hashable) -> bool:
        """Return True if this is the first call for ``key``."""
        first = key not in self._once
        self._once[key] = None
        return first

    def package_of(self, cls: type) -> Package | None:
        """Return :func:`package_of_class`, computed once per walk."""
        known = self._packages.get(id(cls))
        if known is None:
            known = self._packages[id(cls)] = (cls, package_of_class(cls))
        return known[1]

    def run(self) -> None:
        """Write every component that can be reached."""
        progress = True
        while progress:
            progress = False
            for component in self._components:  # grows during the loop
                if not component.done and self._matters(component):
                    component.done = progress = True
                    self._fill(component)
            for unread in self._unread:
                if not unread.read and (self.any_name or unread.name in self.names):
                    unread.read = progress = True
                    self._fill(self._component_of_attribute(unread))

    def run_on(self) -> None:
        """Also write the attributes that no inspected code reads, if they can be compared between processes.

        Within a process the state of such an attribute is irrelevant. Between two processes, a difference may
        come from the source, and code that is not inspected may read the attribute.
        """
        self.run()
        for unread in self._unread:  # grows during the loop
            if not unread.read:
                unread.read = True
                self.attempt(functools.partial(self._fill, self._component_of_attribute(unread)))
                self.run()

    def _component_of_attribute(self, unread: _DeferredAttribute) -> Component:
        label = self._unique_label(f"{unread.label}, attribute {unread.name}")
        component = Component(label, unread.write, True, None, attribute=unread.name)
        unread.found_by.refers.add(component)
        return component

    def reads_of_export(self) -> tuple[set[Component], frozenset[str] | None]:
        """Return what an export reads, without what only Functions read, whose code runs in each call.

        Returns:
            The components, and the attribute names that they read; ``None``: they may read any.
        """
        traced: set[Component] = set()
        functions: set[Component] = set()
        names: set[str] | None = set()
        # An export reads the silent components, too; the names that they read are not a Function's.
        telling: list[Component] = [self._top]
        silent: list[Component] = []
        while telling or silent:
            tells = bool(telling)
            component = telling.pop() if tells else silent.pop()
            if component.owner is ComponentOwner.FUNCTION:
                functions.add(component)
            elif tells and component.owner is ComponentOwner.CONTAINERS:
                silent.append(component)
            elif component not in traced:
                traced.add(component)
                if tells and component.owner is not ComponentOwner.TORCH:
                    names = None if names is None or component.names is None else names | component.names
                (telling if tells else silent).extend(component.refers)
            if tells and not telling:
                # A model may read an attribute of a Function, or call a method of it.
                inner = [inner for function in functions for inner in function.refers - traced]
                telling = [j for j in inner if j.attribute and (names is None or j.attribute in names)]
        return traced, None if names is None else frozenset(names)

    def _matters(self, component: Component) -> bool:
        if component.via is None or (component.own and self.any_name):
            return True
        return not self.names.isdisjoint(component.via)

    def _fill(self, component: Component) -> None:
        self._out, self._component, self._notes = bytearray(), component, []
        self.guards.finder = component
        try:
            text = component.fill()
        except RecursionError:
            text = None
            self.refuse("it is nested too deep to be compared")
        finally:
            self.guards.finder = self._component = self._top
        if text is None:
            text = hashlib.sha256(self._out).hexdigest() + "".join(self._notes)
        if component.own or self._out:
            self.components[component.label] = text
