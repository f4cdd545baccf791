"""The grammar of one tool call, read while its text comes.

    call     = [":"] ["call:"] name ("{" pairs "}" | "(" pairs ")")
    pair     = key ":" value             key    = bare | string
    value    = string | "{" pairs "}" | "[" values "]" | bare
    string   = <|"|> any text <|"|>      which ends only before "," "}" "]" (a key: before ":"), so it may hold quotes
             | "any text" | 'any text'   the same, with backslash escapes

A pushdown scanner: every character is read once, except where a slip of the model is repaired, and then once more.
Repairs: an inner bracket left open is closed with the outer one; a string without its closing delimiter ends at the
next `,key:` (in a list, the next comma) that a delimiter follows, or at the end of the call; one without its opening
delimiter begins with its bare text; a comma that no key follows belongs to the bare value before it.
"""

import re
from dataclasses import dataclass

from dgemma_jax.text.segments import DELIMITER
from dgemma_jax.text.values import Bare, unescaped
from dgemma_jax.text.window import CLOSE, MARKERS, OPEN, Window

MAX_DEPTH = 128
HEADER, BARE_HEADER = r"[\w.:$@/\-\s]{0,200}", r"[\w.$@/\-]{0,200}"  # a name and what may stand before it
_HEADERS = {True: re.compile(HEADER), False: re.compile(BARE_HEADER)}
_NAME = re.compile(r"[\w$@][\w.:$@/-]*(?<!:)")
_STOP_VALUE, _STOP_KEY = re.compile(r"[,{}\[\]()<]"), re.compile(r"[:=,{}\[\])<]")
_STOP_STRING = {DELIMITER: re.compile("<"), '"': re.compile(r'["\\<]'), "'": re.compile(r"['\\<]")}
_STRING_ENDS = {",", "}", "]", CLOSE}
_PLAIN_PAIR = re.compile(r'([\w$.-]+):(?:<\|"\|>([^<]*)<\|"\|>|([\w.+-]+))(?=[,}])')  # one step for what is usual
_NEXT_KEY, _NEXT_ITEM = re.compile(r",\s*([\w.$-]+)\s*:\s*\Z"), re.compile(r",\s*\Z")


@dataclass
class _Container:
    closer: str
    value: dict | list
    key: str | None = None  # of the pair being read, or read last
    tail: list[str] | None = None  # the bare value read last in its pieces between commas; [] after a container


class CallScanner(Window):
    """Reads a call from behind its opener. `feed` until `open` is false; then `done` tells whether it was a call.

    `dead` maps a plain quote to the offset in the stream up to which no string ends with it; scanners of one stream
    share it. `offset` is the place of the scanner's first character in the stream.
    """

    def __init__(self, opener: str, dead: dict[str, int], offset: int):
        super().__init__()
        self.opener, self.explicit = opener, opener != "call:"
        self.open, self.done, self.name, self.arguments = True, False, "", {}
        self._dead, self._offset = dead, offset
        self._stack: list[_Container] = []
        self._mode = self._header

    def feed(self, text: str, pos: int, final: bool) -> tuple[str, int]:
        """Reads on in `text` from `pos`; returns the window and the place in it up to which the call was read."""
        self._enter(text, pos, final)
        while self.open and (self._mode() or (final and self._at_end())):
            pass
        return (self._leave() if self.open else self._text), self._pos

    @property
    def raw(self) -> str:
        """The text read, with the opener."""
        return self.opener + self._read()

    # Each mode reads one thing and returns true, or returns false where it must see more text.

    def _header(self) -> bool:
        found = _HEADERS[self.explicit].match(self._text, self._pos)
        end = found.end() if found else self._pos
        if end == len(self._text) and not self._final:
            return False
        name = self._text[self._pos : end].strip()
        if self.explicit:
            name = re.sub(r"\A(?::\s*)?(?:call\s*:\s*)?", "", name)
        if self._text[end : end + 1] not in ("{", "(") or not _NAME.fullmatch(name):
            return self._fail()
        self.name, self._pos = name, end + 1
        self._push(_Container("}" if self._text[end] == "{" else ")", {}))
        return True

    def _key(self) -> bool:
        self._is_key = True
        plain = self._stack[-1].closer == "}" and _PLAIN_PAIR.match(self._text, self._pos)
        if plain:
            key, string, bare = plain.groups()
            self._begin_pair(key)
            if string is None:
                self._store(Bare(bare), [bare])
            else:
                self._store(string)
            self._pos = plain.end()
            return True
        match self._next():
            case "":
                return False
            case ",":
                self._pos += 1
            case "}" | "]" | ")" as token if self._closes(token):
                self._close(token)
            case "{" | "[":
                return self._fail()
            case token:
                self._begin(token)
        return True

    def _value(self) -> bool:
        self._is_key = False
        token, in_object = self._next(), isinstance(self._stack[-1].value, dict)
        match token:
            case "":
                return False
            case "{" | "[":
                self._pos += 1
                self._push(_Container("}", {}) if token == "{" else _Container("]", []))
            case "," if not in_object:
                self._pos += 1
            case ",":
                self._store(Bare(""))
            case "}" | "]" | ")" if self._closes(token):
                if in_object:
                    self._store(Bare(""))
                self._close(token)
            case _:
                self._begin(token)
        return True

    def _begin(self, token: str) -> None:
        """Begins a string or a bare item, or meets a marker."""
        alive = token in ('"', "'") and self._dead.get(token, 0) <= self._offset + self._here()
        if alive or token == DELIMITER:
            self._quote, self._quote_at, self._mode = token, self._here(), self._string
            self._pos += len(token)
            self._pieces, self._gap, self._cut = [], [], None
        elif len(token) > 1:
            if token == CLOSE and isinstance(self._stack[-1].value, dict) and not self._is_key:
                self._store(Bare(""))
            self._control(token)
        else:
            self._begin_bare()

    def _begin_bare(self) -> None:
        self._pieces, self._nest, self._mode = [], 0, self._bare

    def _bare(self) -> bool:
        found = (_STOP_KEY if self._is_key else _STOP_VALUE).search(self._text, self._pos)
        end = found.start() if found else len(self._text)
        if end > self._pos:
            self._pieces.append(self._text[self._pos : end])
            self._pos = end
        if not found:
            return False
        token = found[0] if found[0] != "<" else self._marker()
        if not token:
            return False
        if len(token) == 1 and self._literal(token):
            self._pieces.append(token)
            self._pos += 1
            return True
        return self._end_key(token) if self._is_key else self._end_value(token)

    def _literal(self, token: str) -> bool:
        """Whether a structural character is text of the bare item; brackets that open inside a value nest."""
        if token in "}])":
            if not self._is_key and self._nest and (token != ")" or self._in_parentheses()):
                self._nest -= 1
                return True
            return not self._closes(token)
        if self._is_key:
            return token in "<[" or (token == "=" and not self._in_parentheses())
        if token in "{[" or (token == "(" and self._in_parentheses()):
            self._nest += 1
        return token != "," or self._nest > 0

    def _end_value(self, token: str) -> bool:
        text = "".join(self._pieces)
        if token == DELIMITER:
            return self._continue_as_string(text)
        if token == CLOSE:
            text = self._without_closers(text)
        if len(token) == 1 or token == CLOSE:
            self._store(Bare(text.strip()), [text])
        return self._close(token) if token in ("}", "]", ")") else token == "," or self._control(token)

    def _end_key(self, token: str) -> bool:
        text, top = "".join(self._pieces), self._stack[-1]
        if token in (":", "="):
            self._pos += 1
            return self._begin_pair(text.strip())
        stray, tail = bool(text.strip()), top.tail or []
        if token == "{" or (token == DELIMITER and not tail) or (stray and top.tail is None):
            return self._fail()
        if token == DELIMITER:
            return self._continue_as_string(",".join([*tail, text]).lstrip())
        if stray:
            tail.append(text)
            top.tail = tail
        self._mode = self._key
        return self._close(token) if token in ("}", "]", ")") else token == "," or self._control(token)

    def _continue_as_string(self, text: str) -> bool:
        """The delimiter found closes a string whose opening one is missing."""
        self._quote, self._is_key, self._mode = DELIMITER, False, self._closing
        self._ended_by = '"'
        self._pos += len(DELIMITER)
        self._pieces, self._gap, self._cut = [text], [], None
        return True

    def _string(self) -> bool:
        found = _STOP_STRING[self._quote].search(self._text, self._pos)
        end = found.start() if found else len(self._text)
        if end > self._pos:
            self._pieces.append(self._text[self._pos : end])
            self._pos = end
        if not found:
            return False
        if found[0] == "\\":
            escape = self._text[end : end + 2]
            if len(escape) < 2 and not self._final:
                return False
            self._pieces.append(escape)
            self._pos += len(escape)
            return True
        token = found[0] if found[0] == self._quote else self._marker()
        if not token:
            return False
        if token in (DELIMITER, self._quote):
            self._ended_by, self._mode = '"' if token == DELIMITER else token, self._closing
        elif token in MARKERS and self._quote != DELIMITER:
            self._give_up_quote()
            return True
        else:
            if token in (OPEN, CLOSE) and not self._cut:
                self._cut = (token, self._here(), len(self._pieces))
            self._pieces.append(token)
        self._pos += len(token)
        return True

    def _closing(self) -> bool:
        """Behind a quote: it ends the string only where the structure goes on."""
        start, token = self._pos, self._next()
        self._gap.append(self._text[start : self._pos])
        if not token:
            return False
        if self._is_key:
            ends = token == ":" or (token == "=" and self._in_parentheses())
        else:
            ends = token in _STRING_ENDS or (token == ")" and self._in_parentheses())
        if ends:
            self._end_string()
        elif self._cut:
            self._end_at_cut()
        elif not self._end_before_next():
            self._pieces += [self._ended_by, *self._gap]
            self._mode = self._string
        self._gap = []
        return True

    def _end_string(self) -> None:
        text = "".join(self._pieces)
        if self._quote != DELIMITER and "\\" in text:
            text = unescaped(text, self._quote)
        if self._is_key:
            self._pos += 1
            self._begin_pair(text)
        else:
            self._store(text)

    def _end_before_next(self) -> bool:
        """A delimiter right behind `,key:`, in a list behind `,`, opens the next string: this one was not closed."""
        in_object = isinstance(self._stack[-1].value, dict)
        last = self._pieces[-1].rstrip() if self._pieces else ""
        if self._is_key or self._quote != DELIMITER or not (last == "" or last.endswith((",", ":"))):
            return False
        tail = "".join(piece[-80:] for piece in self._pieces[-80:])[-80:]
        found = (_NEXT_KEY if in_object else _NEXT_ITEM).search(tail)
        if not found:
            return False
        text = "".join(self._pieces)
        self._store(text[: len(text) - len(tail) + found.start()])
        if in_object:
            self._begin_pair(found[1])
        self._pieces, self._mode = self._gap, self._string
        return True

    def _end_at_cut(self) -> None:
        """No delimiter closes the string behind the marker at the cut: the string had ended before it."""
        assert self._cut is not None
        marker, place, count = self._cut
        self._rewind(place)
        if marker == OPEN or self._is_key:
            self._fail()
        else:
            self._store(self._without_closers("".join(self._pieces[:count])))
            self._control(marker)

    def _give_up_quote(self) -> None:
        """No plain quote closes the string: it is a bare item that begins with a quote character."""
        self._dead[self._quote] = self._offset + self._here()
        self._rewind(self._quote_at)
        self._begin_bare()

    def _at_end(self) -> bool:
        """The text is over: the last repairs; otherwise it was no call."""
        if self._mode in (self._string, self._closing):
            if self._quote != DELIMITER:
                self._give_up_quote()
                return True
            if self._cut:
                self._end_at_cut()
                return True
        self._pos = len(self._text)
        return self._fail()

    # Structure

    def _push(self, container: _Container) -> None:
        self._stack.append(container)
        self._mode = self._key if isinstance(container.value, dict) else self._value
        if len(self._stack) > MAX_DEPTH:
            self._fail()

    def _begin_pair(self, key: str) -> bool:
        top = self._stack[-1]
        _settle(top)
        top.key, top.tail, self._mode = key, None, self._value
        return True

    def _store(self, value, tail: list[str] | None = None) -> None:
        top = self._stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
            self._mode = self._value
        else:
            top.value[top.key], top.tail, self._mode = value, tail, self._key

    def _closes(self, closer: str) -> bool:
        return self._stack[-1].closer == closer or any(container.closer == closer for container in self._stack)

    def _close(self, closer: str) -> bool:
        """Closes the innermost container with this closer and what is open inside it."""
        self._pos += 1
        found = False
        while not found:
            found = self._stack[-1].closer == closer
            self._close_top()
        return True

    def _close_top(self) -> None:
        top = self._stack.pop()
        _settle(top)
        if self._stack:
            self._store(top.value, [])
        else:
            self.arguments, self.open, self.done = top.value, False, True

    def _control(self, marker: str) -> bool:
        """A marker among the arguments: the end of the call, or of the attempt."""
        if marker != CLOSE:
            return self._fail()
        self._pos += len(CLOSE)
        while self._stack:
            self._close_top()
        return True

    def _fail(self) -> bool:
        self.open = False
        return True

    def _without_closers(self, text: str) -> str:
        """`text` without the brackets at its end that close the containers around it."""
        for container in self._stack:
            stripped = text.rstrip()
            if not stripped.endswith(container.closer):
                break
            text = stripped[:-1]
        return text

    def _in_parentheses(self) -> bool:
        return self._stack[0].closer == ")"


def _settle(top: _Container) -> None:
    """Joins the pieces of a bare value that held commas."""
    if not top.tail or len(top.tail) < 2 or not isinstance(top.value, dict):
        return
    if isinstance(top.value.get(top.key), Bare):
        top.value[top.key] = Bare(",".join(top.tail).strip())
