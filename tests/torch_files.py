"""Files of PyTorch for tests: two that torch.save wrote, and pickles put together by hand."""

import base64
import io
import struct
import zipfile
import zlib
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """Operations of a pickle that leave one value on the stack."""

    code: bytes


def named(module: str, name: str) -> Raw:
    return Raw(f"c{module}\n{name}\n".encode())


def called(function: Raw, *arguments: Any) -> Raw:
    return Raw(function.code + code_of(arguments) + b"R")


def storage(key: Any, kind: str = "FloatStorage", size: Any = 4) -> Raw:
    return Raw(code_of(("storage", named("torch", kind), key, "cpu", size)) + b"Q")


def tensor(of: Any, offset: Any = 0, shape: Any = (4,), strides: Any = (1,), *more: Any) -> Raw:
    hooks = called(named("collections", "OrderedDict"))
    function = named("torch._utils", "_rebuild_tensor_v2")
    return called(function, of, offset, shape, strides, False, hooks, *more)


def code_of(value: Any) -> bytes:
    """Return the operations that put a value on the stack."""
    match value:
        case Raw(code):
            return code
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            size = (value.bit_length() + 8) // 8
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case dict():
            return b"}(" + b"".join(code_of(x) for pair in value.items() for x in pair) + b"u"
        case list():
            return b"](" + b"".join(map(code_of, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(code_of, value)) + b"t"
    raise TypeError(value)


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + code_of(value) + b"."


def archive(value: Any, records: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive as torch.save writes it; storages are records such as "data/0"."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as members:
        members.writestr("net/data.pkl", pickled(value))
        for name, data in records.items():
            members.writestr(f"net/{name}", data)
    return file.getvalue()


def sequence(value: Any, keys: Any, storages: list[bytes], **about: Any) -> bytes:
    """Return a file of the format before PyTorch 1.6; each storage begins with its length."""
    about = {"protocol_version": 1001, "little_endian": True} | about
    first = 0x1950A86A20F9469CFC6C
    return b"".join([*map(pickled, (first, 1001, about, value, keys)), *storages])


def recorded(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


# {"state": OrderedDict(...), "epoch": 3} of PyTorch 2.14.1: (torch.arange(3) % 2 if it is bool else
# torch.arange(3)).to(dtype) by the name of each dtype; "T": b.T, "part": b[1:, ::2], two views of
# b = torch.arange(12.).reshape(3, 4); "scalar": torch.tensor(3.5).
ARCHIVE = (
    "c-pO)U2qds6vsD7n}$%D0$M&4L`5lIX}+@oO50FkaZ%bWU_dl%(`^&kW^<C8LQ$j&t)ln=ir>TdppQQL;)74>gD<"
    "G#j59tk<BWs8=r}s#0}tN2ca!YBp~NQa^k&<g{r}Fn=bn4+X@(_7iy*jMLe14FtPqq!I+LANd&U){c=IQ;M7%>d%"
    "3QPdGaz&)Td|;s6r_SJoz^u?O{1)yE4mL9#?^v4KA24-H`q7J;OI`a;dduAT|vPBw4{-aZFo~9l+}vvR6!jpWwr4"
    "XQgcPUkeUv-p|zVziug@sQUxcKxDy01N*}tREosB=_`sEP;Cnh>f+dmzfqO&}B*z>qm27j+ej!6#ScafO22a(GNC"
    "-MJ*i5F39@I-?np$BmH`snykujJnP3B#Mc{gQtAy_5D>MGM8fi(<sNYN%L#I*)70QXShy(V!TA+D#y`w(o9;r=99"
    "nXxkR0R|aQ(8m?*g9bJT8!7f76Z<g1Zlc(31o(4H5-+-t%^?xCGRQp{rBK0bGjJi;PH|on*F$hVit{4~$PhHvALF"
    "o#A%-`a(F@f@3LC&ML?|$70!0FhQQ!^)J7w5a2I3UyWq|u~Rord^7lA&C>o;)&1Q(~cJqQM6*jvWol}<3Y{d#V)!"
    "h6KvMPZ2Y_L;m#2~VQD{RkeD;c<gkGU9iDU6L78&6{C^C&CEj$tG`<@D5VmAq0nIc*0nYF<sXn$>Q*%3hs!3i@{N"
    "fd(y-mBe<t1?r8)m8IC8HkUgMJ<u&ybp0dI&F@4T%pRuH!q__{#6h3akRRW)&@JR$28L~-t748p+@XW2~+zvWH@q"
    "W-Ke#*q>2wtc7JOYrRkaU`%#ko|hQyqeCKvmmbvqHEJ<<LxC9j{m~QR@Mi#@3w(PMX$F5$iM5`f1aDYS|6XB6v=Q"
    "Gs$J;4K1eB&{S|D2hV2=n;DZDgtK%`vnKTgLVb}^&zV$);D+-E=46;R*7G2|L<5*<qrecnjDhV4E)Zag<d}z7B%9"
    "PS53f?_MFg+O@Vb#Rd8L5hjWQr(D&HKzI=f__hfCy_dALlKZy|VFhAT#hi)lqu3h)kVJPhw*gbl%a*!bqnRQ5iC4"
    "`leTWMsXX*V7sJNOF|C!%~~8XU$jVZ{p`<3@><=tP=VvXNh-0FH9*YHLVtk_>4%zcXCI{qAovi;`2X#K1X6n#==g"
    "l6{1xq%v?z+T6QuwrRGo~9&E&qNQgMlcM^Uh@w4C7f#sGcjNw9|lf$ve`D<B(G?n-;*Za#FvartE`p_ZlW={1UUn"
    "0Jv2?r>3whw>w6EE^#eB*1!f3(-}LS()0C*mQYar@=#&pz`P!<Q|tpF*qgAFJ#5vW@j6kcf8+i?F|oTKoE@{(A%Q"
    "4>lWr9DBq5r+?>L8?Ya0(!R}3jGw)5&_x<AM;+q>tnqLn-rG#}llj~5t|KlCeloPPf%!+8&wpEG=eM~|cTBHqApf"
    "Jy=D*Fn+s!-i<=bNy4>XYf;-d1usr8RFzy3C3s-riK{#xI@N9gCu4z7N?gy!<Ee9cyBPdWaV_6{ZM$KNAt<($IBa"
    "Fftb{i~^ig4L(8U*G+8{fdwLw^YZkm7HI=FnWY0_n$}T<*2v-#u{G&K{Sfr%trgwM%F)cXV#ydfA|NFSv)?*<4Zi"
    "QleiDy|E2NRfQN5@ID6{M#O_AoAHHS$j~fBl`i~kQ4Pi?iX0-#kGyPZ4O{`zLI(evm|Fd2QR2wj3N=3Dh#U0pbg?"
    "w9(%8n=E-bFg&i$;9mpf4JTM8%jGh{b}U-xu*m#h@sLeKCJD5{|_Ju>kQ>`pk2=8~f31cxf|AW!X<_AKO{uIsZKf"
    "ueLUzs~F{er?61x%R{V9<XQ%D%?hdMTzQVQ5nRr2<TjzU0p;b^4z7cd|JWvQy(6!+c3iCXn2Xc;d9Ag7VzoDTZGh"
    "KWdmmPNcnPNs@>=WB#m$%3hIp;D=CRsQH>VBrT5G4k+2yqnUTZzsxi~N7w9)@R-y6JE<h9mgmYZ)or;YJi>uKm=w"
    "BPeue@$Xpk1ST4S;mX~w_7C--;wZV951$>EUfr&jkqSatd*XdbB(wrxvV9f70-HjaZPqvD>5to!6IIu5?Kr7dbWa"
    "e3Ux~Ou;g@ZD;Ipn_KLELyB}$#_kTOfjfs<dc`A%_RU6u2$=KCc(`CF*-~A7kcoOO"
)
SEQUENCE = (
    "c-n=PS$Eq+6o4h!u@f~(!%kUK)`TU<lA_2^NYaMTqHa-I5KD0#TZvp0%U2$UrVwhDm@e%5QqJL#pTSSzl{a2FhX?"
    "LxCUT?*$nn_Dc=UaDmV2iwU6cL4Z!G>be&N^C2d28xi9d4qz6HXBGbRW^D-1|b3;fE48@3xk6GR-~jNmVRgAm`Xx"
    "XpT_+63u}BV#AoY`K+o<C5Ek+!o{~oB`}?dqGHGz>=IC{?}*{C|G$XPZ>dT4T@I2)7f!G<4KjcAl6XpyETH=wtOn"
    "AyP;cOXw--d(xeT!38#o-SN)($G!^nS5`;Bxs?s41zb#inccs(t>lNZQ+d){_P-PgHV2`wMWOdDj0((SWq=;qKDM"
    "Qg2#W7`Fo6!_=M%T**(g&l+Ypo6pS-F!0<Rwe6a@(-a61QRasz(DFAuwvg{(e-34r3lly&cg)&{^@_*mP6Eq|T^%"
    "$$*<ZX1IkLZl#9XnBjH;ci3=e-+<!}Bn(HZ{%Xv>tIt;zRV$fgLxH<F{~pf2m-6pp{QC)v+i=hs#K%^41P>$xhZk"
    "9QEO{_73C+N1DDV)MJj^AJP|2fAGC=^}AB(mhkAex0Cj>{lY8b<xNWqoqk_u09_!NgfMd1pAmk6jfXwfM`IEJq$="
    "*#pZ#`x*vR+}YVSHR%-8ICt8zRd7X6L`jkLpyjp7|$l~$C`ckbIH}$R2us%htF~NJcS=-@FN5kY<PYLj;Cia0Y8q"
    "p64PHuu8eNt=E6}<KgQ`VQo6<H#|fOU;bcVbMC*Pkxv`t1e=<*}7DiWbVU{@E=JaJsKf~x}3A|*(%h9H;1c47u5{"
    "_Ll{FT(gD7vD+s~r9shrdqY=NSAA0u>w1J3}-DgY}m0Uc|+zCXWs4Pp0xpDgkt3+JG82)w#)~rd4KIBjDN4h$<O3"
    "l~fZhWT{fg{AOxarIKNS&t2=>)ugU~xmpCkhR`YS4Z*Y8{+}AA$w2ynOz}D<pKa2rTaQEOq*GFxR$&7}DPSmX@lY"
    "<(P&Qd8m-x(B7&5#~;2j&bqADMi0kh)j>)L7)-u0pYyp%#Oo2m|%`E0vf@g7yY&lDeUMFJ<ohXl55=s6<N&cH`(o"
    "xNf@bqu6mLHaP#uTpy6%JtxyC0h9&TxW)l34CJ1r_m8?Rq?+0?7wKAbJ`b6$dW9n2Vc@JJ@|^zz9#UE4c|t))2>z"
    "hY6#!`3(ugb_dW7N<o$rrO-?e#j|6_Q;YKIQIky$mJowql(VOlZz3DQFznGQPQr24MvMOUfYvTv93Undsk}GDF!@"
    ";alFqD;8a@KXTFDu!HvvOr5t6q*~?cM&Y4H$E$=oP*9@6TEOWiI`@$Ui0i8UJqfhl)~R*LbNvM(EC_iQU<xB{5!<"
    "_J-GuLrdrd;m|IOC}huT&-{eluoN(wE1l<XM#T8S*2VS<w%@S*P8supFota$n=&uP&zzt82W_-&F#"
)
"""The same, written with _use_new_zipfile_serialization=False."""
