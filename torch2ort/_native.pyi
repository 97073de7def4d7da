"""The native extension: runs a Function's ``forward`` and ``backward`` for a runtime, as eager PyTorch would.

Built from ``runtime_ext/``. Tensors cross by DLPack without a copy; nothing here knows torch's or ONNX
Runtime's headers. Every function needs the GIL. One :class:`Site` stands for one call of a Function in an
exported model and holds all that is decided once; a :class:`Run` holds the contexts of one forward run for
its backward.

Words: an *argument* is a position among all arguments of ``apply``; an *output* is a position among all
values that ``forward`` returns; dtypes are torch's names without ``torch.``, such as ``"float32"``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, final

from torch import Tensor, UntypedStorage

_Made = TypeVar("_Made")

def configure(
    *,
    exchange_api: object,
    tensor_type: type[Tensor],
    privatize: Callable[[Tensor], object],
    warn_alias: Callable[[Site, str, int, int], object],
    use_count: Callable[[int], int] | None,
    is_base_held: Callable[[Tensor], bool],
    error_type: type[Exception],
    inplace_error_type: type[Exception],
) -> None:
    """Hands the module what it needs of torch and of torch2ort. Call it once, before anything else.

    Args:
        exchange_api: The capsule ``torch.Tensor.__dlpack_c_exchange_api__``.
        tensor_type: ``torch.Tensor``.
        privatize: Called with a tensor over a storage that a Function keeps although the runtime may write
            into its memory; must move the storage, behind every view of it, to memory of its own, for example
            by ``tensor.untyped_storage().share_memory_()``. The rare path: a site's next calls get a copy
            instead.
        warn_alias: Called as ``warn_alias(site, kind, key, value)`` when undeclared aliasing was made correct
            by a copy that the in-place map ``kind={key: value}`` would save, once per site, kind and key.
            ``kind`` is ``"forward"`` (key an output, value an argument) or ``"backward"`` (key an argument,
            value an output). What it raises, the call raises.
        use_count: Called with the address of a storage; must tell how many hold it. What a Function returns
            is copied if somebody holds it whom the module does not know of; without this, always.
        is_base_held: Called with a tensor that a Function returned and whose memory one more may hold; must
            tell whether that is another than the tensor which it is a view of, with nobody else behind it.
        error_type: Raised when a Function does other than what was exported, and when the module is used
            wrongly.
        inplace_error_type: Raised when a declared in-place map contradicts what a Function does.

    Raises:
        RuntimeError: torch's exchange interface is not of DLPack 1.
        TypeError: An argument is missing or of the wrong type.
    """

def find_layout(own: tuple[Tensor, ...], foreign: tuple[Tensor, ...]) -> bool:
    """Finds by trial where torch counts who holds a tensor and who wrote to it, so that no call needs to ask.

    Args:
        own: Tensors on the CPU whose memory torch's own allocator gave, at least two, each of a storage of
            its own that nobody else holds; they are filled with zeros. None: what was found is forgotten.
        foreign: Tensors over memory that something else gave, at least one.

    Returns:
        Whether it was found; ``use_count`` of :func:`configure` is asked where it was not.
    """

def holders(tensor: Tensor) -> int:
    """How many tensors and handles hold the memory of ``tensor``, itself among them.

    -1 if that is not known: :func:`find_layout` found nothing, torch's own allocator for the CPU did not give
    the memory, or more than its Python object holds the tensor.
    """

def writes(tensor: Tensor) -> int:
    """How often torch wrote to the memory of ``tensor``, as its ``_version`` says.

    -1 if that is not known: :func:`find_layout` found nothing, or torch does not count, as in inference mode.
    """

def form(tensors: list[Tensor], parameter_type: type[Tensor], /) -> bytes | None:
    """What a graph is chosen by of plain tensors: types, sizes, strides, devices, gradients, identity.

    Equal for tensors that are equal in all of this. ``None`` if one is of another class than ``torch.Tensor``
    and ``parameter_type``, or not a strided tensor.
    """

@final
class Noted:
    """Where tensors lie and how often they were written to, at the time when this was made.

    Args:
        tensors: The tensors, which it holds.
        writes_of: Asked for how often torch wrote to a tensor, where that is not known here.
    """

    def __new__(cls, tensors: tuple[Tensor, ...], writes_of: Callable[[Tensor], int]) -> Noted: ...
    def moved(self, positions: Iterable[int], /) -> list[int]:
        """Those among these positions whose tensors lie elsewhere now."""

    def written(self, positions: Iterable[int], /) -> list[tuple[int, int, int]]:
        """The same of those that were written to: position, how often by now, and how often then."""

@final
class Switches(Generic[_Made]):
    """Settings that many places ask for: read in one call, and described anew where one has changed.

    Args:
        reads: Functions and their arguments. They change nothing, and give the same object for the same
            setting, as those of torch do with ``True``, ``None`` and dtypes.
        make: Called with what they give.
    """

    def __new__(
        cls, reads: tuple[tuple[Callable[..., object], tuple[Any, ...]], ...], make: Callable[..., _Made]
    ) -> Switches[_Made]: ...
    def now(self) -> _Made:
        """What ``make`` returns: the object of the last time where nothing has changed."""

class Context:
    """The object that ``forward`` and ``backward`` get as ``ctx``: the surface of torch's ``FunctionCtx``.

    Takes attributes of any name, weak references, and subclasses. What ``save_for_backward``, ``mark_dirty``
    and the others were given reads back under torch's names, ``None`` where they were not called.
    """

    needs_input_grad: tuple[bool, ...]
    to_save: tuple[Tensor | None, ...] | None
    saved_for_forward: tuple[Tensor | None, ...] | None
    dirty_tensors: tuple[Tensor, ...] | None
    non_differentiable: tuple[Tensor, ...] | None
    materialize_grads: bool

    def __new__(cls, needs_input_grad: tuple[bool, ...]) -> Context: ...
    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """What ``save_for_backward`` was given; ``()`` while a site runs ``forward``, as in torch.

        Raises:
            RuntimeError: The context was released, or a saved tensor was written to since; with torch's
                wording.
        """

    @property
    def saved_variables(self) -> tuple[Tensor | None, ...]:
        """The old name of :attr:`saved_tensors`; issues the ``DeprecationWarning`` that torch issues."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Saves tensors for ``backward``.

        Raises:
            TypeError: An argument is neither a tensor nor ``None``. Inside a site's call it is raised when
                ``forward`` has returned, as torch does, and only when the call would be recorded for
                backward.
        """

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Saves tensors for ``jvp``, which no runtime calls.

        Raises:
            AssertionError: An argument is neither a tensor nor ``None``.
        """

    def mark_dirty(self, *args: Tensor) -> None:
        """Marks arguments that ``forward`` writes to."""

    def mark_non_differentiable(self, *args: Tensor) -> None:
        """Marks outputs that have no gradient."""

    def mark_shared_storage(self, *pairs: Any) -> None:
        """Does nothing but issue the ``FutureWarning`` that torch issues."""

    def set_materialize_grads(self, value: bool) -> None:
        """Says whether ``backward`` gets zeros (the default) or ``None`` for an output without gradient.

        Raises:
            TypeError: ``value`` is not a bool.
        """

    def release(self) -> None:
        """Frees what was saved; ``saved_tensors`` raises from now on."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any, /) -> None: ...

@final
class Site:
    """One call of a Function in an exported model.

    Attributes:
        name: The Function's qualified name, for messages.
        key: Unique name of the site.
        calls: Forward calls so far.
        copied_bytes: Bytes copied so far to keep memory apart: private copies of what a Function writes to or
            keeps, and copies of outputs and gradients that would share memory. A site's first forward works
            on copies of all arguments that are not mapped, and its first backward on copies of all gradients,
            to see what the Function keeps and writes to.
    """

    name: str
    key: str
    calls: int
    copied_bytes: int

    def __new__(
        cls,
        *,
        name: str,
        key: str,
        forward: Callable[..., Any],
        setup_context: Callable[..., Any] | None = None,
        backward: Callable[..., Any],
        arguments: tuple[Any, ...],
        tensor_positions: tuple[int, ...],
        needs_input_grad: tuple[bool, ...],
        input_dtypes: tuple[str, ...],
        outputs: tuple[Any, ...],
        tensor_outputs: tuple[int, ...],
        output_dtypes: tuple[str, ...],
        output_ranks: tuple[int, ...],
        returns_tuple: bool,
        training: bool,
        non_differentiable: tuple[int, ...] = (),
        mutated: tuple[int, ...] = (),
        forward_map: Mapping[int, int] = ...,
        backward_map: Mapping[int, int] = ...,
        probed: bool = True,
        originals: Mapping[int, int] = ...,
    ) -> Site:
        """Decides everything about the call that does not change from run to run.

        Args:
            name: The Function's qualified name. Torch's own messages name the last part of it.
            key: Unique name of the site, found in :attr:`Run.undefined`.
            forward: Called as ``forward(ctx, *arguments)``, or ``forward(*arguments)`` with a
                ``setup_context``.
            setup_context: Called as ``setup_context(ctx, arguments, output)``; ``None`` in the style without.
            backward: Called as ``backward(ctx, *gradients)``, one gradient a value that ``forward`` returns.
            arguments: One entry an argument: the very object that ``forward`` gets; ignored at tensor
                positions.
            tensor_positions: Arguments that are tensors, increasing.
            needs_input_grad: One entry an argument.
            input_dtypes: One entry a tensor argument.
            outputs: One entry an output: the constant that ``forward`` returned at export; ignored at tensor
                outputs.
            tensor_outputs: Outputs that are tensors, increasing.
            output_dtypes: One entry a tensor output, then one for each mutated argument that ``forward`` does
                not return itself, in order of position. These follow the other outputs.
            output_ranks: The same, number of dimensions.
            returns_tuple: ``forward`` returns a tuple, not a single value.
            training: Contexts go into the current run for backward.
            non_differentiable: Tensor outputs that have no gradient: marked so, or of a dtype without
                gradients.
            mutated: Tensor arguments that ``forward`` writes to. It gets private copies of them, unless a
                ``forward_map`` says that an output takes over the argument's memory.
            forward_map: Output to the argument whose memory it is.
            backward_map: Argument to the output the memory of whose gradient the argument's gradient is.
            probed: The first calls work on copies, to see what the Function keeps and writes to. Not needed
                for one that is known to do neither with what is not in ``mutated``, nor to keep what it
                returns, and of which nobody is to be warned.
            originals: Position of a tensor argument -> number among :attr:`Run.originals` of the tensor that
                forward gets in its place, if the run has it.

        Raises:
            TypeError: An argument is missing or of the wrong type.
            ValueError: A position, count or dtype does not fit the others.
        """

@final
class Chain:
    """Sites that follow each other directly, which one node of a runtime calls.

    Takes the tensor arguments of all its sites, in order, but for the links, and gives what the last one
    gives; backward takes the gradients of that, and gives those of the arguments. What passes
    from one to the next is torch's own tensor, which the runtime does not see.

    Attributes:
        key: Unique name of the chain.
    """

    key: str

    def __new__(cls, key: str, sites: tuple[Site, ...], links: tuple[int, ...]) -> Chain:
        """Builds a chain.

        Args:
            key: Unique name of the chain.
            sites: Each but the last has one tensor output, which only the next one takes.
            links: Per site the index of the tensor argument that is the output of the site before; -1 for
                the first.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: The links do not fit the sites.
        """

@final
class DirectCall:
    """An operator of PyTorch, or a fused region, that a node of the custom operator calls in C++.

    It needs neither Python nor its lock.

    The first call of each node goes to the site all the same, whose call policy checks what the operator
    does. So do all after one that failed in C++ and not in the site.

    Attributes:
        site: does the same in Python.
    """

    site: Site

    def __new__(
        cls,
        *,
        site: Site,
        operator: str,
        overload: str,
        arguments: list[Any],
        results: list[tuple[bool, tuple[int, ...]]],
        function: str,
        numbers: list[float],
        written: tuple[str, int] | None,
        grad_mode: bool,
    ) -> DirectCall:
        """Looks up what the call needs of the torch that was imported.

        Args:
            site: A call that keeps no context, writes to nothing, and gives memory of its own.
            operator: ``"aten::mm"``.
            overload: ``""`` for the default one.
            arguments: One an argument of the operator's schema: ``None``, a bool, int, float or str, a list
                of such, ``("optional", item)`` where the schema allows none, ``("tensor", i)`` for the site's
                tensor ``i``, ``("permuted", i, order)`` for its dimensions in another order, ``("size", i,
                dimension, sign)``, ``("dtype", "float32")``, ``("layout", "strided")``, ``("memory_format",
                "channels_last")``, ``("device", "cpu")``.
            results: Of each of the operator's results, which are the site's outputs, whether it is computed,
                and the order that its dimensions are given in; ``()`` for its own.
            function: ``""``, or the function of torch's C interface that is called instead of the dispatcher,
                with the tensors in ``arguments`` and with ``numbers``: two of them behind four tensors, the
                first of which it writes its result to, else one result is its own.
            numbers: See there.
            written: ``None`` for results with memory of their own. A result that is written to the runtime's
                memory is the tensor behind the site's in ``arguments``, with the sizes of argument ``i`` for
                ``("like", i)``, and those of the product of arguments ``i`` and ``i + 1`` for ``("product",
                i)``.
            grad_mode: Whether PyTorch's grad mode is on while it runs, for kernels that ask for it.

        Raises:
            NotImplementedError: This torch has not what the call needs.
            ValueError: The arguments are of no such form.
        """
    @classmethod
    def of_region(
        cls,
        *,
        site: Site,
        address: int,
        inputs: list[tuple[int, ...]],
        outputs: list[tuple[int, ...]],
        temporaries: list[int],
        numbers: int,
        varying: list[tuple[int, int]],
    ) -> DirectCall:
        """A call of a library's function, which stays loaded as long as the process runs.

        Args:
            site: A call as above.
            address: Of the function. It takes an array of the addresses of inputs, outputs and temporaries,
                and one of the sizes that vary, and gives 0 if it succeeded.
            inputs: Sizes of the tensors that it reads, all contiguous; -1 for each that varies. Others go to
                the site.
            outputs: Likewise of those that it writes, which are the site's outputs.
            temporaries: Bytes of each piece of memory that it needs besides, or -1.
            numbers: Address of a function that is given the sizes that vary, and writes down all of these
                numbers, those of the inputs first; 0 if none of them is -1.
            varying: Where each size that varies is found: an input and a dimension of it. Those below 2 go to
                the site.

        Raises:
            ValueError: The tensors are not the site's, or the arguments are of no such form.
        """

@final
class Run:
    """The contexts of one forward run, one a site. ``len()`` counts them; an empty run is false.

    Attributes:
        undefined: ``(site key, argument)`` for each needed gradient that ``backward`` left out and that is
            zeros now.
        arrivals: asked with a site's key before its backward, once a gradient is undefined or if the run is
            ``partial``: ``None`` if every gradient arrives, ``()`` if autograd would not run that backward,
            else a ``bool`` per tensor that forward returned. What does not arrive counts as missing.
        keeps: whether backwards leave the contexts for another one.
        partial: whether gradients of the model's own outputs are missing.
        originals: tensors of the caller's that Functions get as they are, see :class:`Site`.
    """

    undefined: set[tuple[str, int]]
    arrivals: Callable[[str], tuple[bool, ...] | None] | None
    keeps: bool
    partial: bool
    originals: tuple[Tensor, ...] | None

    def __new__(cls) -> Run: ...
    def __len__(self) -> int: ...
    def clear(self) -> None:
        """Releases and drops every context and every donated value, and empties the set."""
    def donate(self, values: Sequence[object]) -> None:
        """Makes the run the owner of values that forward left for its backward, instead of earlier ones.

        The ``Donated`` node of that number in a backward session takes one, or a copy if the run ``keeps``
        what it has.

        Args:
            values: DLPack capsules named ``"dltensor"``, of contiguous memory on the CPU.

        Raises:
            ValueError: One of them is no such capsule.
        """
    def feed(self, tensors: Sequence[Tensor]) -> None:
        """Names tensors that forward is fed with and that nobody writes to before backward.

        A Function that keeps an argument which begins where one of them does gets that memory, and no copy.
        Nothing but the Function has to keep it alive.

        Args:
            tensors: Contiguous; each takes the place of those of the call before. Nobody gives them other
                memory.

        Raises:
            TypeError: One of them is no tensor.
        """

def begin(run: Run | None) -> Run | None:
    """Makes ``run`` this thread's current run: where forward puts contexts and backward finds them.

    Without a run, contexts are dropped at once.

    Returns:
        The run that was current before.

    Raises:
        TypeError: ``run`` is neither a :class:`Run` nor ``None``.
    """

def configure_custom_op(
    *,
    resolve: Callable[[str, str, str], Site | Chain | DirectCall],
    is_grad_enabled: Callable[[], bool],
    set_grad_enabled: Callable[[bool], object],
    stream: Callable[[int, int], AbstractContextManager[object]],
    is_sole_holder: Callable[[UntypedStorage], bool],
) -> None:
    """Hands the custom operator what it needs of Python.

    Onnxruntime loads the operator from this module's file. What an earlier call gave is replaced, for
    kernels made before too, and never freed.

    Args:
        resolve: Called as ``resolve(func_name, site_key, site)`` with a node's attributes, ``""`` for one
            that it has not, when a session makes the node's kernel. What it raises makes the session fail.
        is_grad_enabled: ``torch.is_grad_enabled``.
        set_grad_enabled: ``torch.set_grad_enabled``.
        stream: Called as ``stream(address, device)``; makes a CUDA stream torch's current one.
        is_sole_holder: Called with the storage of an output that one tensor holds besides; says whether
            nobody else does, so that the runtime may have the memory for its own.

    Raises:
        TypeError: An argument is missing.
    """

def take_custom_op_error(number: int) -> BaseException | None:
    """Takes the exception, with its traceback, that a node with a ``site_key`` left, if there is one.

    Args:
        number: What ``[torch2ort error N]`` at the end of onnxruntime's message says. The last 64 are kept.
    """

def try_cuda() -> None:
    """Lets nodes run on the CUDAExecutionProvider, which is refused by name before."""

def lend_allocator() -> bool:
    """Lets sessions that are made from now on take a Function's large outputs as they are.

    Gives the process's onnxruntime an allocator of this module for the CPU; a session asks for it with
    ``session.use_env_allocators``.

    Returns:
        Whether onnxruntime took it. Before 1.23 it does not, nor if the process gave it another.
    """

def withdraw_allocator() -> None:
    """Takes it back. Sessions made in between keep it."""

def call_forward(callee: Site | Chain, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Runs a callee's forward on torch tensors, as a runtime without callbacks of its own would.

    Args:
        callee: The call, or calls.
        tensors: One a tensor argument. Its memory counts as the runtime's: it may be overwritten after the
            call.

    Returns:
        One tensor a tensor output, contiguous, mutated arguments that forward does not return last. Each has
        memory of its own, unless a map says otherwise.

    Raises:
        Exception: Whatever the Function raises, and the types given to :func:`configure`.
    """

def call_backward(callee: Site | Chain, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Runs a callee's backward with the context of its forward in the current run.

    Args:
        callee: The call, or calls.
        grads: One a tensor output, ``None`` where there is no gradient.

    Returns:
        One gradient a tensor argument, contiguous; ``None`` for one that needs none. Each has memory of its
        own, unless a map says otherwise.

    Raises:
        RuntimeError: The gradients do not fit forward's arguments; with torch's wording.
        Exception: Whatever the Function raises, and the types given to :func:`configure`.
    """

def intercept(
    method: Callable[..., Any],
    name: str,
    stand_in: Callable[[type, tuple[Any, ...], dict[str, Any] | None], Any],
    /,
) -> None:
    """Puts ``stand_in`` in front of a class method that C code defines, for every caller on every thread.

    The entry of the method in its table is replaced, which is what a call reads however the caller got the
    method: methods bound before, and those of subclasses, are caught. No Python object changes.

    Args:
        method: The method, bound to any class.
        name: Its name.
        stand_in: Called as ``stand_in(class, args, kwargs)`` instead of the method, which is called after all
            when it returns ``NotImplemented``.

    Raises:
        RuntimeError: An interception is under way already, or the method is not one that can be intercepted;
            the text goes on a sentence about the method ("it is ...").
    """

def end_interception() -> None:
    """Puts everything back as it was before :func:`intercept`. Does nothing without one."""

class Guards:
    """What a graph was made from, compared by identity in one pass.

    Args:
        checks: ``(kind, owner, name)`` each. The present state of each owner is what it is compared with.
            Kinds: 0, keys and values of a dictionary; 1, one entry of a dictionary, which may be missing; 2,
            the items of a list or tuple; 3, the type of an object; 4, what an attribute gives; 5, a
            dictionary of tensors: as 0, and type, dtype, device, shape, strides and ``requires_grad`` of
            each, where the types in the tuple ``name`` are as good as one; 6, what a callable gives, compared
            with ``==``; 7, the size of a dictionary.

    Raises:
        TypeError: a check is of no such form.
    """

    def __new__(cls, checks: Iterable[tuple[int, object, object]]) -> Guards: ...
    def __len__(self) -> int: ...
    def first_changed(self, start: int = 0) -> int:
        """Position of the first check from ``start`` on whose owner is not as it was; -1 if all are."""

    def all_changed(self, start: int = 0) -> list[int]:
        """Positions of all checks from ``start`` on whose owners are not as they were."""

    def rearm(self, index: int) -> None:
        """Compares with the present state of that check's owner from now on."""

    def is_alike(self, index: int) -> bool:
        """Whether a dictionary of tensors holds tensors of the same names and forms, be they other objects.

        Raises:
            TypeError: that check is not about tensors.
        """

    def expected(self, index: int) -> list[object]:
        """What that check compares with: keys and values in turn, or values.

        Raises:
            TypeError: it is about tensors, which are not kept.
        """

def registered_options() -> object:
    """A capsule around the ``SessionOptions`` that this thread registered the custom operators with last.

    It stands for an object of Python's and does not keep it alive. ``None`` if there was none.
    """

@final
class Kept:
    """Values that one half of a step left for the other; its length is how many."""

    def __len__(self) -> int: ...

@final
class Half:
    """A session over one half of a step, through which values pass without Python objects.

    Args:
        model: ONNX whose nodes are bound, or the path of a file.
        inputs: Names of what is fed.
        outputs: Names of what is computed.
        sources: What is fed behind what the other half kept: positions of the caller's tensors, or constants.
        varying: How many of the caller's tensors are others in every call. The values of the rest, and of
            those of ``weight_type``, are made once for as long as they are where they were.
        fetched: Positions of the outputs that become tensors.
        kept: What is left for the other half: positions of outputs, or ``~i`` of what was fed as number i.
        donated: Positions of the outputs that the run owns, for nodes of the other half to take.
        plain: Makes a contiguous tensor on the CPU of one that is none; what it raises, a run raises.
        weight_type: ``torch.nn.Parameter``.
        options: See :func:`registered_options`; their Python object has to live meanwhile.

    Raises:
        RuntimeError: ONNX Runtime refuses the model.
        ValueError: A position is of no input or output.
    """

    def __new__(
        cls,
        *,
        model: bytes | str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        sources: Iterable[int | Tensor],
        varying: int,
        fetched: Iterable[int],
        kept: Iterable[int],
        donated: Iterable[int],
        plain: Callable[[Tensor], Tensor],
        weight_type: type[Tensor],
        options: object,
    ) -> Half: ...
    def run(self, kept: Kept | None, tensors: Iterable[Tensor], run: Run, /) -> tuple[list[Tensor], Kept]:
        """Computes the half, without the lock of the interpreter where no Function asks for it.

        Args:
            kept: What the other half left.
            tensors: The caller's.
            run: What Functions leave their contexts in; gets what is donated.

        Returns:
            The tensors that are fetched, and what is left for the other half.

        Raises:
            error_type: ONNX Runtime failed, or a tensor is of a type that it lacks. What a Function raised
                arrives as the same object.
        """
