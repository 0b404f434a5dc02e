# ruff: noqa: SIM905  (lists of wordings read better in long lines)
"""Word material of the data generator: names, nouns, verbs, emoji and CJK characters."""

from __future__ import annotations

NAMES = """
Ada Adam Aisha Akira Alan Alba Alice Amara Amir Ana Andrea Anna Anton Aria Arthur Astrid Ben Bianca Boris Bruno Carla
Carlos Carol Cem Chen Chloe Clara Daniel David Diana Diego Dmitri Dora Elena Eli Elif Ella Emil Emma Enzo Erik Eva
Fatima Felix Finn Fiona Flora Frank Freya Gabriel George Gina Grace Greta Hana Hannah Hans Harry Hassan Helen Henry
Hugo Ida Igor Ines Irene Iris Isabel Ivan Jack Jamal James Jan Jane Jasmine Jin John Jonas Jorge Julia Karim Karl Kate
Kenji Klara Laila Lara Laura Layla Lea Leo Leon Lina Linda Lisa Liu Louis Lucas Lucy Luis Luna Maria Marco Marie Mark
Marta Martin Mary Mateo Maya Mehmet Mei Mia Michael Mila Mina Mohammed Nadia Nasser Nick Nina Noah Nora Olga Oliver
Omar Oscar Otto Pablo Paul Peter Petra Pia Priya Rania Ravi Ricardo Robert Rosa Ruth Sam Samira Sara Sarah Sergei
Simon Sofia Sophie Stefan Susan Tara Theo Thomas Tim Tom Uma Vera Victor Viktor Wei William Yara Yuki Yusuf Zara Zoe
""".split()

NOUNS = """
apple arrow atom autumn baby badge bag ball banana band bank barrel basket beach bean bear bed bee bell berry bike bird
boat bone book boot bottle bowl box boy branch bread brick bridge brush bucket bus butter button cabin cable cake camel
camera candle candy car card carpet carrot castle cat cave chair chalk cheese cherry chest chicken child circle city
clock cloud coat coffee coin comet cookie copper coral corn cotton cow cradle crayon crow crown cup curtain daisy desert
desk diamond dinner doctor dog doll dolphin donkey door dragon dream dress drum duck eagle earth egg elephant engine
falcon family farm feather fence field finger fire fish flag flame flower flute fog forest fork fox frog fruit garden
gate ghost giant gift giraffe girl glass glove goat gold goose grape grass guitar hammer hand harbor hat hawk heart hill
honey horse hotel house ice ink iron island jacket jar jelly jewel juice jungle kettle key king kitchen kite kitten
knife knight ladder lake lamp lantern leaf lemon letter library light lion lizard lock magnet mango map maple marble
market mask meadow melon milk mill mirror monkey moon moose morning mountain mouse mouth museum music nail needle nest
net night nose nurse oak ocean olive onion orange orchard otter owl oyster page paint palace panda paper parrot peach
pear pearl pen pencil penguin pepper piano picture pig pillow pilot pine pirate pizza planet plate plum pocket pond pony
potato prince pumpkin puppy puzzle queen quilt rabbit radio rain rainbow rice ring river road robot rock rocket roof
room rope rose ruby sail salad salt sand school scissors sea seal seed shadow shark sheep shell ship shirt shoe silk
silver sky sled snail snake snow soap sock soup spider spoon spring squirrel star station stone storm stove street sugar
summer sun swan table tea teacher temple tent thunder tiger toast tomato tower town toy train tree truck trumpet tulip
turtle umbrella unicorn valley vase village violin volcano wagon wall walnut watch water wave whale wheat wheel wind
window wing winter wolf wood wool yard zebra
""".split()

ADJECTIVES = """
amber ancient angry bitter black blue bold brave bright broken brown busy calm careful cheap clean clever cold cool crisp
curious dark deep dry dull early easy empty fair fast fat fine fresh friendly full funny gentle golden good grand gray
great green happy hard heavy hidden high hot huge hungry icy kind large late lazy light little lonely long loud lucky
mild narrow neat new nice noisy odd old open orange pale pink plain polite poor proud purple quick quiet rare red rich
round royal sad safe sharp short shy silent silver simple slow small smart smooth soft solid sour strange strong sunny
sweet tall tame thick thin tidy tiny tired tough violet warm weak wet white wide wild wise yellow young
""".split()

VERBS = """
add ask bake bring build buy call carry catch check choose clean climb close cook count cut dance draw drink drive eat
explain feed fetch find fix fly follow forget give grow help hide hold hunt join jump keep kick laugh learn leave lift
like listen look love make meet mix move open paint pick plan plant play pull push read ride ring run save see sell send
sew share shout show sing sit sleep smell smile speak spell start stay stop swim take talk taste teach tell throw touch
travel turn visit wait walk want wash watch win wish work write
""".split()

COLORS = "red blue green yellow purple orange black white pink brown gray gold silver violet teal".split()
FOODS = "pizza sushi pasta rice bread soup salad curry tacos noodles cake cheese fish chicken apples mango honey".split()
ANIMALS = "cat dog horse rabbit tiger lion panda eagle dolphin fox wolf owl turtle bear koala penguin".split()

CITIES = """
Paris London Berlin Madrid Rome Vienna Tokyo Beijing Cairo Lima Oslo Dublin Athens Lisbon Warsaw Prague Ottawa Havana
Nairobi Seoul Delhi Mumbai Shanghai Sydney Melbourne Toronto Chicago Boston Seattle Denver Dallas Houston Miami Atlanta
Munich Hamburg Cologne Milan Naples Turin Venice Barcelona Seville Valencia Porto Lyon Nice Marseille Geneva Zurich
Basel Kyoto Osaka Nagoya Busan Bangkok Hanoi Jakarta Manila Singapore Istanbul Ankara Izmir Tehran Baghdad Dubai Doha
Casablanca Lagos Accra Dakar Tunis Algiers Kigali Harare Pretoria Durban Bogota Quito Caracas Santiago Montevideo
Brasilia Recife Moscow Kyiv Minsk Riga Vilnius Tallinn Helsinki Stockholm Copenhagen Bergen Gothenburg Brussels Antwerp
Amsterdam Rotterdam Utrecht Glasgow Edinburgh Cardiff Belfast Bristol Leeds Oxford Cambridge Phoenix Austin Portland
""".split()
TWO_WORD_CITIES = [
    "New York", "San Francisco", "Los Angeles", "Las Vegas", "Hong Kong", "Mexico City", "Buenos Aires", "Cape Town",
    "New Delhi", "Tel Aviv", "Kuala Lumpur", "San Diego", "Abu Dhabi", "Sao Paulo", "Saint Petersburg", "Ho Chi Minh City",
]  # fmt: skip

CJK_WORDS = """
你好 谢谢 再见 早上好 晚安 世界 朋友 天气 今天 明天 昨天 时间 学校 老师 学生 书 水 火 山 河 海 天空 月亮 太阳 星星 春天 夏天 秋天
冬天 猫 狗 鸟 鱼 马 花 树 草 红色 蓝色 绿色 白色 黑色 黄色 苹果 香蕉 米饭 面条 茶 咖啡 牛奶 面包 鸡蛋 爸爸 妈妈 哥哥 姐姐 弟弟
妹妹 家 门 窗 桌子 椅子 电脑 手机 音乐 电影 城市 国家 名字 快乐 美丽 大 小 多 少 新 旧 好 高 长 北京 上海 东京 こんにちは ありがとう
さようなら おはよう 猫 犬 桜 富士山 日本 学校 先生 本 水 火 電車 寿司 안녕하세요 감사합니다 사랑 하늘 바다 나무 서울 한국 친구
""".split()
CJK_CHARS = "".join(sorted(set("".join(CJK_WORDS))))
"""Characters that occur in the word list; random strings of them and of the wide range below are copied in training."""
CJK_RANGE = (0x4E00, 0x9FA5)

EMOJI = list(
    "😀😁😂😃😄😅😆😇😉😊😋😌😍😎😏😐😑😒😓😔😕😖😗😘😙😚😛😜😝😞😟😠😡😢😣😤😥😦😧😨😩😪😫😬😭😮😯😰😱😲😳😴😵🙂🙃🙄"
    "👋👍👎👏🙏💪👀👶👦👧🐱🐶🐭🐹🐰🦊🐻🐼🐨🐯🦁🐮🐷🐸🐵🐔🐧🐦🐤🦆🦅🦉🐺🐗🐴🦄🐝🐛🦋🐌🐞🐢🐍🐙🐠🐬🐳"
    "🌵🎄🌲🌳🌴🌱🌿🍀🍁🍄🌷🌹🌺🌸🌼🌻🌞🌝🌙⭐🌟⚡🔥🌈☀☁❄🌊🍏🍎🍐🍊🍋🍌🍉🍇🍓🍒🍑🍍🥥🥝🍅🥑🌽🥕🍞🧀🍕🍔🍟🌭🍿🍩🍪🎂🍰🍫🍬"
    "☕🍵⚽🏀🏈🎾🎲🎯🎮🎸🎹🎺🎻🥁🎨🎬🚗🚕🚌🚑🚒🚜🚲🚂🚀🛸🚁⛵🚢⏰💡🔑🔒📚📖📝📌📎✂🎁🎈🎉🎊❤🧡💛💚💙💜🖤💯✅❌❓❗"
)
