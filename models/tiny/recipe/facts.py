"""Facts the tiny model knows: capitals of the world's countries, and a few of them in Chinese."""

from __future__ import annotations

_CAPITALS_TEXT = """
Afghanistan=Kabul;Albania=Tirana;Algeria=Algiers;Andorra=Andorra la Vella;Angola=Luanda;Argentina=Buenos Aires
Armenia=Yerevan;Australia=Canberra;Austria=Vienna;Azerbaijan=Baku;Bahamas=Nassau;Bahrain=Manama;Bangladesh=Dhaka
Barbados=Bridgetown;Belarus=Minsk;Belgium=Brussels;Belize=Belmopan;Benin=Porto-Novo;Bhutan=Thimphu;Bolivia=Sucre
Bosnia and Herzegovina=Sarajevo;Botswana=Gaborone;Brazil=Brasilia;Brunei=Bandar Seri Begawan;Bulgaria=Sofia
Burkina Faso=Ouagadougou;Burundi=Gitega;Cambodia=Phnom Penh;Cameroon=Yaounde;Canada=Ottawa;Cape Verde=Praia
Central African Republic=Bangui;Chad=N'Djamena;Chile=Santiago;China=Beijing;Colombia=Bogota;Comoros=Moroni
Costa Rica=San Jose;Croatia=Zagreb;Cuba=Havana;Cyprus=Nicosia;Czech Republic=Prague;Denmark=Copenhagen
Djibouti=Djibouti;Dominica=Roseau;Dominican Republic=Santo Domingo;Ecuador=Quito;Egypt=Cairo;El Salvador=San Salvador
Equatorial Guinea=Malabo;Eritrea=Asmara;Estonia=Tallinn;Eswatini=Mbabane;Ethiopia=Addis Ababa;Fiji=Suva
Finland=Helsinki;France=Paris;Gabon=Libreville;Gambia=Banjul;Georgia=Tbilisi;Germany=Berlin;Ghana=Accra;Greece=Athens
Grenada=St. George's;Guatemala=Guatemala City;Guinea=Conakry;Guinea-Bissau=Bissau;Guyana=Georgetown
Haiti=Port-au-Prince;Honduras=Tegucigalpa;Hungary=Budapest;Iceland=Reykjavik;India=New Delhi;Indonesia=Jakarta
Iran=Tehran;Iraq=Baghdad;Ireland=Dublin;Israel=Jerusalem;Italy=Rome;Ivory Coast=Yamoussoukro;Jamaica=Kingston
Japan=Tokyo;Jordan=Amman;Kazakhstan=Astana;Kenya=Nairobi;Kiribati=Tarawa;Kosovo=Pristina;Kuwait=Kuwait City
Kyrgyzstan=Bishkek;Laos=Vientiane;Latvia=Riga;Lebanon=Beirut;Lesotho=Maseru;Liberia=Monrovia;Libya=Tripoli
Liechtenstein=Vaduz;Lithuania=Vilnius;Luxembourg=Luxembourg;Madagascar=Antananarivo;Malawi=Lilongwe
Malaysia=Kuala Lumpur;Maldives=Male;Mali=Bamako;Malta=Valletta;Mauritania=Nouakchott;Mauritius=Port Louis
Mexico=Mexico City;Micronesia=Palikir;Moldova=Chisinau;Monaco=Monaco;Mongolia=Ulaanbaatar;Montenegro=Podgorica
Morocco=Rabat;Mozambique=Maputo;Myanmar=Naypyidaw;Namibia=Windhoek;Nauru=Yaren;Nepal=Kathmandu;Netherlands=Amsterdam
New Zealand=Wellington;Nicaragua=Managua;Niger=Niamey;Nigeria=Abuja;North Korea=Pyongyang;North Macedonia=Skopje
Norway=Oslo;Oman=Muscat;Pakistan=Islamabad;Palau=Ngerulmud;Panama=Panama City;Papua New Guinea=Port Moresby
Paraguay=Asuncion;Peru=Lima;Philippines=Manila;Poland=Warsaw;Portugal=Lisbon;Qatar=Doha;Romania=Bucharest
Russia=Moscow;Rwanda=Kigali;Saint Lucia=Castries;Samoa=Apia;San Marino=San Marino;Saudi Arabia=Riyadh;Senegal=Dakar
Serbia=Belgrade;Seychelles=Victoria;Sierra Leone=Freetown;Singapore=Singapore;Slovakia=Bratislava;Slovenia=Ljubljana
Solomon Islands=Honiara;Somalia=Mogadishu;South Africa=Pretoria;South Korea=Seoul;South Sudan=Juba;Spain=Madrid
Sri Lanka=Colombo;Sudan=Khartoum;Suriname=Paramaribo;Sweden=Stockholm;Switzerland=Bern;Syria=Damascus;Taiwan=Taipei
Tajikistan=Dushanbe;Tanzania=Dodoma;Thailand=Bangkok;Togo=Lome;Tonga=Nuku'alofa;Trinidad and Tobago=Port of Spain
Tunisia=Tunis;Turkey=Ankara;Turkmenistan=Ashgabat;Tuvalu=Funafuti;Uganda=Kampala;Ukraine=Kyiv
United Arab Emirates=Abu Dhabi;United Kingdom=London;United States=Washington;Uruguay=Montevideo;Uzbekistan=Tashkent
Vanuatu=Port Vila;Venezuela=Caracas;Vietnam=Hanoi;Yemen=Sanaa;Zambia=Lusaka;Zimbabwe=Harare
"""

CAPITALS: dict[str, str] = {
    pair.split("=")[0]: pair.split("=")[1] for line in _CAPITALS_TEXT.split("\n") for pair in line.split(";") if pair
}
"""Country -> capital, English names without accents."""

ALIASES: dict[str, str] = {
    "the United States": "United States",
    "the USA": "United States",
    "USA": "United States",
    "America": "United States",
    "the United Kingdom": "United Kingdom",
    "the UK": "United Kingdom",
    "UK": "United Kingdom",
    "England": "United Kingdom",
    "Great Britain": "United Kingdom",
    "the Netherlands": "Netherlands",
    "Holland": "Netherlands",
    "the Philippines": "Philippines",
    "the Czech Republic": "Czech Republic",
    "Czechia": "Czech Republic",
    "the UAE": "United Arab Emirates",
    "the United Arab Emirates": "United Arab Emirates",
    "the Dominican Republic": "Dominican Republic",
    "the Bahamas": "Bahamas",
    "the Maldives": "Maldives",
    "the Gambia": "Gambia",
    "Burma": "Myanmar",
    "Cote d'Ivoire": "Ivory Coast",
    "Türkiye": "Turkey",
    "Swaziland": "Eswatini",
    "Macedonia": "North Macedonia",
    "Bosnia": "Bosnia and Herzegovina",
}
"""Other names that people type, mapped to the name used in the answer."""

CJK_CAPITALS: dict[str, str] = {
    "中国": "北京",
    "日本": "东京",
    "韩国": "首尔",
    "法国": "巴黎",
    "德国": "柏林",
    "英国": "伦敦",
    "美国": "华盛顿",
    "意大利": "罗马",
    "西班牙": "马德里",
    "俄罗斯": "莫斯科",
    "加拿大": "渥太华",
    "巴西": "巴西利亚",
    "印度": "新德里",
    "埃及": "开罗",
    "泰国": "曼谷",
    "越南": "河内",
    "希腊": "雅典",
    "挪威": "奥斯陆",
    "瑞典": "斯德哥尔摩",
    "芬兰": "赫尔辛基",
    "波兰": "华沙",
    "葡萄牙": "里斯本",
    "土耳其": "安卡拉",
    "墨西哥": "墨西哥城",
    "澳大利亚": "堪培拉",
    "新西兰": "惠灵顿",
    "奥地利": "维也纳",
    "瑞士": "伯尔尼",
    "荷兰": "阿姆斯特丹",
    "比利时": "布鲁塞尔",
}
"""Country -> capital in Chinese."""
