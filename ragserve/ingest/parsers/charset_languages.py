"""Letters and common words of the languages that 8-bit charsets were made for.

Each language: its letters outside of ASCII in lower case, the most common first, and words that make up a
fifth to a half of most texts; tables of nouns have none of those. They tell charsets apart that give the
same bytes to different letters.
"""

from __future__ import annotations

from typing import NamedTuple


class Language(NamedTuple):
    """``letters`` gives those outside of ASCII, from near 0 to 1, the most common one; ``words`` are the most
    common ones. All are in lower case. ``latin``: the language is not written in those letters alone."""

    letters: dict[str, float]
    words: frozenset[str]
    latin: bool


_TABLE = {
    "English": (
        "éèïêöçñâàëæœ",
        "the of and to in a is that it for was with as on be are this by not from or an at his they we you",
    ),
    "French": (
        "éèàêçùôîâûïëœüÿæ",
        "de la le et les des en un une du que est dans qui pour pas sur au il elle ne se à par plus ce sont",
    ),
    "German": (
        "üäößéèàáç",
        "der die das und in den von zu ist nicht mit sich auf ein eine dem des es im er sie für wie "
        "als man bis",
    ),
    "Spanish": (
        "óíáñéúüºª",
        "de la que el en y los se del las un por con no una su para es al lo más como a o le ya muy",
    ),
    "Portuguese": (
        "ãçáéíóêâàõúôüºª",
        "de a o que e do da em um para é com não uma os no se na por mais as dos ao das",
    ),
    "Italian": (
        "àèùòéìíóî",
        "di e il la che in un è per non una del si della con le da i al sono ha alla gli dei",
    ),
    "Catalan": ("àçéèíïóòúü·", "de la i el que a en les els un per amb del una és no al es com dels"),
    "Dutch": (
        "ëéïóèöüáà",
        "de van het een en in is dat op te zijn met voor niet aan er die om als ook maar bij",
    ),
    "Swedish": ("äåöéüà", "och i att det som en på är av för med den till inte har de om ett jag var men"),
    "Danish": ("æøåéüá", "og i at det er en den til på som de med for af ikke der et har han var om jeg"),
    "Norwegian": ("øåæéòêôüà", "og i det er på en som til av for at med de ikke den har jeg et var om han"),
    "Finnish": (
        "äöåšž",
        "ja on ei että se oli hän mutta kun niin myös ovat sen tai jo joka vain olen mitä en jos ole "
        "siitä minä sitä nyt sitten voi",
    ),
    "Icelandic": ("íðáóéúþöæý", "og að í á er sem það en við ekki um til með var ég fyrir hann af hún þá"),
    "Polish": (
        "łąęóśżćńź",
        "i w na z nie się do to że jest o jak po co za od a przez ale już tym był oraz dla są być "
        "który tylko może czy jego ich przy",
    ),
    "Czech": (
        "íáěéýřčšžůúťóňď",
        "a se v na je že to s z do o i ve pro za by jako jsem si po ale od jeho k u který když jsou "
        "byl jen tak už při co není nebo",
    ),
    "Slovak": (
        "áíéýčšžúôťľňäóďŕĺ",
        "a sa v na je že to s z do o aj vo pre za by ako som si po ale od jeho k ktorý keď sú bol "
        "len tak už pri čo nie alebo",
    ),
    "Hungarian": (
        "áéőóöíüúű",
        "a az és hogy nem is egy van ez de volt meg csak már mint el ha ki még vagy azt ezt mert "
        "majd lehet kell nagyon",
    ),
    "Romanian": (
        "ăîâșțşţ",
        "de și şi în a la cu pe nu o un din care se este să mai că au fi lui ce ale pentru",
    ),
    "Croatian": ("čšžćđ", "i je u se na da za su s od ne a što to kao iz o koji bi ili sam ali"),
    "Slovene": ("čšžćđ", "in je v na se da za so z ki ne pa kot po tudi ali od bi sem o s pri"),
    "Turkish": (
        "ıüşğçöâîû",
        "ve bir bu da de için ile çok o ne gibi daha olarak var en sonra kadar ama her değil olan ya "
        "ki mi ben sen biz onu bana şey iki önce göre üzere zaman",
    ),
    "Lithuanian": ("ėųšįžąčęū", "ir į kad yra su iš tai buvo ne bet kaip už po ar jo o jis apie dar"),
    "Latvian": ("āīēšūņļžčķģōŗ", "un ir ka no ar par uz bet tas kas bija kā pie ne to arī es viņš"),
    "Estonian": ("äõüöšž", "ja on ei et see oli ka ta mis kui oma aga ning või ma seda siis"),
    "Russian": (
        "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё",
        "и в не на что с я он как это а по но из к у за от так же было для все его она мы вы они был "
        "если или только уже до ни бы при когда ещё чтобы их",
    ),
    "Ukrainian": (
        "оаинвтерсіклудмпзябьгчйхжцшїюєщфґ",
        "і в не на що з я він як це а та до у за від але було для й про його вона ми ви вони був "
        "якщо або тільки вже при коли ще щоб їх",
    ),
    "Bulgarian": (
        "аиоетнрсвлкдпмзъугбчщцяжйхшюфь",
        "и на да се в от за не е с по че като са това към при как си го",
    ),
    "Serbian": ("аоиенртсјвкудмплзгбњчшцжљћхђфџ", "и је у се на да за су од не а што то као из о који би"),
    "Greek": (
        "αοιετνσηυρπκμλωςίάόέθδγήχύφώξβζψϊϋΐΰ",
        "και το η της να του ο των τα την με για από που στο οι είναι δεν σε τη τον στην ένα μας",
    ),
    "Hebrew": ("יוהלאמרבתשנעדקחפכטםסזגצןךףץ", "של את על לא זה עם הוא כי גם היא אל מה אני כל"),
    "Arabic": ("اليمنوترهبعسفدكقحجةأشطصخذزضثغإىءظئآؤًٌٍَُِّْ", "في من على أن إلى هذا التي لا عن مع ما كان هذه ذلك"),
}
VOWELS = frozenset("аеёиоуыэюяіїєъαεηιουωάέήίόύώϊϋΐΰ")  # of Cyrillic and Greek, with the vowel of Bulgarian
FINAL_LETTERS = frozenset("ςםןךףץ")  # which end words
# by multi-byte charset: its national standard, and the lead bytes of the characters in daily use there
DAILY_USE = {
    "gb18030": ("gb2312", 0xB0, 0xD7),
    "big5": ("big5", 0xA4, 0xC6),
    "cp932": ("euc_jp", 0xA4, 0xCF),
    "euc_jp": ("euc_jp", 0xA4, 0xCF),
    "cp949": ("euc_kr", 0xB0, 0xC8),
}
# by multi-byte charset: the characters that make up a good part of any text it was made for
_KANA = "のにはをたがでてとしれさあいうかこすなまもよらりる"
COMMON_CHARACTERS = {
    charset: frozenset(characters)
    for charset, characters in {
        "gb18030": "的一是不了在人有我他这中大来上个国们到说地为子时道出就得着也那要下看以可生会",
        "big5": "的一是不了在人有我他這中大來上個國們到說地為子時道出就得著也那要下看以可生會",
        "cp932": _KANA,
        "euc_jp": _KANA,
        "cp949": "이다는의에을가고하지도를은로기나서한자사리어라인그대아",
    }.items()
}
LANGUAGE_TABLE = {
    name: Language(
        {letter: 1 - rank / len(letters) for rank, letter in enumerate(letters)},
        frozenset(words.split()),
        letters[0] < "\u0250",
    )
    for name, (letters, words) in _TABLE.items()
}
