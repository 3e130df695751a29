"""Word lists and sentences for the demo prompts; everything here was written for this project."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", " ").split(";") if part.strip())


CONCEPTS = _split("""
gravity; photosynthesis; inflation; evolution; electricity; magnetism; the water cycle; plate tectonics; a black hole; natural
selection; the greenhouse effect; supply and demand; democracy; machine learning; an algorithm; encryption; the immune system; a
vaccine; DNA; an atom; a chemical reaction; probability; compound interest; a mortgage; insurance; the stock market; a budget
deficit; recycling; renewable energy; nuclear fusion; the solar system; a solar eclipse; the seasons; the tides; a rainbow;
sound waves; friction; inertia; momentum; a lever; the nervous system; digestion; blood pressure; sleep cycles; memory; habit
formation; empathy; critical thinking; a database; a computer network; cloud computing; an operating system; open source
software; a compiler; a neural network; biodiversity; a food chain; symbiosis; erosion; a glacier; a volcano; the carbon cycle;
fermentation; caramelization
""")
FACT_SUBJECTS = _split("""
honeybees; octopuses; penguins; elephants; the Moon; Mars; the Pacific Ocean; the Amazon rainforest; Mount Everest; the Sahara
desert; coffee; chocolate; tea; bamboo; spiders; sharks; bats; owls; dolphins; whales; salmon; butterflies; ants; wolves;
tigers; kangaroos; camels; lightning; snow; diamonds; gold; salt; the Great Wall of China; the Eiffel Tower; ancient Egypt; the
Roman Empire; the printing press; the bicycle; the piano; chess; the human heart; the human brain; bones; mushrooms; oak trees;
sunflowers; coral reefs; volcanoes; glaciers; clouds
""")
LIST_THINGS = _split("""
healthy breakfast ideas; ways to save money; tips for better sleep; indoor hobbies; outdoor games for children; rainy day
activities; ways to reduce stress; healthy snacks; ideas for a birthday party; ways to save water at home; houseplants that need
little light; easy exercises for beginners; ways to learn a language; good habits for students; gift ideas for a teacher; ideas
for a weekend trip; ways to stay focused at work; things to pack for camping; ways to make new friends; common kitchen tools;
musical instruments; renewable energy sources; jobs that involve animals; questions to ask a new colleague; ways to reuse glass
jars; ideas for a science fair; vegetables that grow in winter; fruits rich in vitamin C; simple card games; ways to thank a
volunteer; safety rules for cycling; benefits of reading every day; benefits of walking; ideas for a school project; uses for
baking soda; uses for old newspapers; team building activities; ways to save electricity; famous rivers; spring flowers; dog
breeds; types of clouds; kinds of pasta; programming languages
""")
STORY_SUBJECTS = _split("""
a lost kitten; a lighthouse keeper; a brave little robot; a talking tree; a baker who can fly; two brothers and a boat; a shy
dragon; a girl who paints the sky; an old clock; a mouse in a library; a farmer and a star; a fox who learns to share; a train
that is always late; a hidden garden; a boy and his kite; a magic pencil; a snowman in summer; a penguin who hates the cold; a
forgotten letter; a singing river; an astronaut and her plant; a king who lost his crown; a dog who finds a treasure map; a
village without music; a turtle who wants to race; a wizard with no spells; a night at the museum; a broken violin; a bridge
between two towns; the last bookshop; a friendly ghost; a mountain guide; a storm at sea; a cat detective; a gardener on the
Moon; a teacher and a quiet student; a lonely scarecrow; a red umbrella
""")
EMAIL_SUBJECTS = _split("""
my manager about a day off; a client about a delayed delivery; a colleague about a missed meeting; my landlord about a leaking
tap; a teacher about a late assignment; a friend about a dinner party; a hotel about a changed booking; the bank about a lost
card; a supplier about a wrong order; a team about a new schedule; a neighbor about loud music; a customer about a refund; a
professor about a recommendation letter; a recruiter about an interview; a coach about a missed practice; a gym about a
cancelled membership; a landlord about renewing the lease; a doctor's office about a new appointment; a librarian about an
overdue book; a school about a field trip; my team about a successful project; a mentor about career advice; a company about a
job opening; a restaurant about a reservation; an airline about lost luggage; a charity about volunteering; a web designer about
a new website; a parent about a school play; a plumber about a repair; a conference organizer about a talk
""")
PAIRS = _split("""
cats and dogs; tea and coffee; trains and planes; books and films; city life and country life; summer and winter; gas stoves and
electric stoves; renting and buying a home; online classes and classroom lessons; running and swimming; laptops and desktop
computers; butter and olive oil; paper books and e-readers; crocodiles and alligators; frogs and toads; weather and climate;
viruses and bacteria; plant cells and animal cells; speed and velocity; mass and weight; stocks and bonds; debit cards and
credit cards; lists and tuples in Python; Python and JavaScript; hardware and software; comets and asteroids; stars and planets;
rivers and lakes; brown rice and white rice; yoga and pilates; jam and jelly; solar power and wind power; cotton and wool;
violins and cellos; novels and short stories; oceans and seas; horses and donkeys; bees and wasps
""")
TASKS = _split("""
change a bicycle tire; make a paper airplane; plant a tomato; bake a loaf of bread; clean a window; write a resume; set up a
tent; wash a wool sweater; brew a cup of tea; tie a necktie; start a small garden; organize a closet; plan a budget; prepare for
an exam; train a puppy; paint a room; fix a squeaky door; make a bird feeder; create a strong password; back up a computer;
learn to juggle; give a short speech; clean a coffee machine; pack a suitcase; write a thank you note; read a map; start a book
club; grow herbs indoors; build a sandcastle; make a compost pile; iron a shirt; sharpen a kitchen knife; hang a picture;
defrost a freezer; repot a houseplant; plan a picnic; take a good photograph; boil an egg; remove a stain; start a blog
""")
PROBLEMS = _split("""
I cannot fall asleep at night; I feel nervous before exams; my roommate is very messy; I keep forgetting names; I spend too much
money online; I want to wake up earlier; I have trouble speaking in public; my plants keep dying; I feel tired every afternoon;
my friend is angry with me; I am starting a new job next week; I want to read more books; my desk is always untidy; I
procrastinate a lot; I moved to a new city and feel lonely; my dog barks at night; I want to eat less sugar; I have too many
meetings; I need to learn math quickly; my child does not like vegetables; I want to start running; I cannot decide what to
study; I get distracted by my phone; my team does not communicate well; I have a sore back; I want to save for a house; my
internet is slow; I argued with my sister; I am afraid of flying; I want to learn to cook
""")
POEM_SUBJECTS = _split("""
the sea; autumn leaves; a quiet morning; the first snow; an old friend; the city at night; a garden in spring; the moon; rain on
the roof; a long road; my grandmother's kitchen; the wind; a sleeping cat; hope; a candle; the mountains; a summer evening; a
paper boat; stars; a river; bread; the color blue; a railway station; birds at dawn; an empty chair; fireflies; music; time; the
forest; a lighthouse
""")
SENTENCES = _split("""
The meeting was moved to Friday because two people were ill.; He ran to the shop since there was no milk left at home.; The film
was long but the ending was worth the wait.; We could not find the key so we climbed in through the window.; She has been
learning the piano for three years and plays every evening.; The new bridge will open next month if the weather is good.; My
brother sold his car and bought a bicycle.; The soup was too salty for the guests.; The report is late because the data was
incomplete.; Our neighbors are planting trees along the street.; The train stopped for an hour in the middle of a field.; I
forgot my umbrella and got completely wet.; The children built a tall tower out of boxes.; The museum is free on the first
Sunday of the month.; They cancelled the picnic after hearing the forecast.; The teacher gave us two more days to finish the
project.; Nobody noticed that the clock had stopped.; The bakery on the corner makes the best bread in town.; He apologized for
the mistake and offered to fix it.; The library will stay open late during the exams.; Her idea saved the company a lot of
money.; The dog waited by the door until we came home.; We should leave early to avoid the traffic.; The old map showed a road
that no longer exists.; The phone rang while I was in the garden.; The team won the game in the last minute.; The shop sells
used books and old records.; It took three people to carry the table upstairs.
""")
PARAGRAPHS = _split("""
The town opened a new park last spring. It has a pond, two playgrounds and a path for cyclists. Families now spend most weekends
there.; Many people drink coffee in the morning because it helps them feel awake. Too much coffee late in the day can make it
hard to sleep.; Bees visit flowers to collect nectar. While they do this, they carry pollen from one plant to another, which
helps fruit and seeds to grow.; The company tested a shorter work week for six months. Output stayed the same, and most workers
said they felt less tired.; A small library began to lend tools as well as books. Neighbors can now borrow a drill or a ladder
for free, and fewer people need to buy them.; The river floods almost every winter. This year the village built a low wall, and
for the first time the houses stayed dry.; Regular walking is good for the heart. It costs nothing, needs no equipment, and can
be done almost anywhere.; The old theater was closed for ten years. Volunteers repaired the roof and painted the walls, and last
week it opened with a sold out show.; Glass can be recycled many times without losing quality. Melting old glass also uses less
energy than making new glass from sand.; A group of students measured the noise near their school. They found that the street
was loudest in the morning, so the city lowered the speed limit.; Our bakery used to throw away bread at night. Now the unsold
loaves go to a food bank, and nothing is wasted.; The storm cut the power for two days. People shared candles, cooked together
outside, and got to know each other better.; Learning a language takes time. Short daily practice works better than one long
lesson a week, and speaking with others helps most of all.; The new bus line connects the station with the hospital. It runs
every ten minutes and is free for students and older people.; Trees cool a city in summer. They give shade, and water that
leaves their leaves lowers the temperature of the air.; The chess club meets every Tuesday. Beginners are welcome, boards are
provided, and the first month is free.
""")
PRODUCTS = _split("""
a wooden toy train; a stainless steel water bottle; a wool blanket; noise cancelling headphones; a folding bicycle; a ceramic
coffee mug; a leather notebook; a solar powered lamp; a garden tool set; a yoga mat; a handmade soap; a travel backpack; an
electric kettle; a desk lamp; a pair of hiking boots; a raincoat; a chess set; a cast iron pan; a bird feeder; an alarm clock; a
picnic basket; a jigsaw puzzle; a reusable shopping bag; a wireless mouse; a scented candle; a kitchen scale; a baby stroller; a
camping tent; a fountain pen; a dog leash
""")
FUNCTIONS = _split("""
adds two numbers; reverses a string; checks if a number is even; finds the largest number in a list; counts the vowels in a
string; computes the factorial of a number; checks if a word is a palindrome; converts Celsius to Fahrenheit; returns the sum of
a list; removes duplicates from a list; sorts a list of words by length; counts the words in a sentence; returns the first n
Fibonacci numbers; checks if a number is prime; computes the average of a list; finds the shortest word in a list; merges two
dictionaries; swaps two values; returns the last element of a list; capitalizes every word; computes the area of a circle; finds
the common elements of two lists; squares every number in a list; counts how often a letter appears; converts minutes to hours
and minutes; checks if a year is a leap year; reads a text file and returns its lines; joins a list of words with commas;
returns the even numbers of a list; computes the greatest common divisor
""")
DISHES = _split("""
pancakes; vegetable soup; tomato pasta; fried rice; banana bread; a Greek salad; an omelette; lentil curry; mashed potatoes;
apple pie; chicken soup; guacamole; chocolate chip cookies; a tuna sandwich; roasted vegetables; oatmeal with fruit; lemonade;
garlic bread; a fruit smoothie; mushroom risotto; bean chili; potato salad; hummus; French toast; stuffed peppers; carrot cake;
pizza dough; a cheese quiche; rice pudding; coleslaw
""")
PLACES = _split("""
Paris; Tokyo; New York; Rome; Cairo; Sydney; London; Barcelona; Istanbul; Lisbon; Amsterdam; Berlin; Vienna; Prague; Athens;
Dublin; Toronto; Mexico City; Rio de Janeiro; Buenos Aires; Cape Town; Nairobi; Bangkok; Singapore; Seoul; Mumbai; Iceland;
Norway; Scotland; Switzerland; Peru; Kenya
""")
DECISIONS = _split("""
working from home; owning a car; living in a big city; having a pet; using social media; buying second hand clothes; studying
abroad; starting a business; homework for young children; electric cars; a four day work week; school uniforms; online shopping;
learning to code; a vegetarian diet; public transport; owning a house; freelance work; video games; zoos; fast food; group
projects; city bike sharing; nuclear power; paper money; space travel; shared kitchens; night shifts; remote learning; keeping a
diary
""")
SPEAKERS = _split("""
a customer and a baker; a teacher and a student; a doctor and a patient; two friends at a bus stop; a tourist and a local; a
parent and a child at bedtime; a waiter and a guest; a librarian and a reader; a cat and a mouse; two robots; a farmer and a
city visitor; a coach and a player; a pilot and a passenger; a chef and an apprentice; a detective and a witness; two neighbors
about a tree; an interviewer and a candidate; a sailor and a fish; the sun and the moon; a gardener and a child; a shopkeeper
and a customer about a return; a mechanic and a driver; two students before an exam; a grandmother and her grandson
""")
QUIZ_TOPICS = _split("""
the solar system; European capitals; animals of Africa; world oceans; basic chemistry; ancient Greece; famous inventions; the
human body; classical music; geometry; weather; dinosaurs; the Olympic Games; healthy food; computers; birds; fairy tales; world
rivers; the alphabet; trees; money; space travel; colors; road safety; simple fractions; insects
""")
WHY_FACTS = _split("""
the sky is blue; leaves change color in autumn; the sea is salty; we dream; cats purr; bread rises; ice floats on water; we have
leap years; birds migrate; metal feels colder than wood; onions make us cry; the Moon has phases; people yawn; plants need
sunlight; rust forms on iron; it is colder on mountains; we need sleep; bees make honey; stars twinkle; popcorn pops; we have
time zones; deserts are cold at night; dogs wag their tails; exercise is good for us; water boils at a lower temperature on a
mountain; glass is transparent; some animals hibernate; thunder follows lightning; soap cleans our hands; fish can breathe under
water
""")
PEOPLE = _split("""
Isaac Newton; Marie Curie; Albert Einstein; Leonardo da Vinci; William Shakespeare; Ludwig van Beethoven; Charles Darwin;
Galileo Galilei; Ada Lovelace; Alan Turing; Nelson Mandela; Mahatma Gandhi; Cleopatra; Julius Caesar; Abraham Lincoln; Amelia
Earhart; Jane Austen; Vincent van Gogh; Wolfgang Amadeus Mozart; Florence Nightingale; Thomas Edison; Nikola Tesla; Rosa Parks;
Frida Kahlo; Marco Polo; Neil Armstrong
""")
COUNTRIES = _split("""
France; Japan; Brazil; Egypt; Canada; Italy; Spain; Germany; Australia; India; Kenya; Norway; Greece; Portugal; Mexico;
Argentina; Thailand; Poland; Sweden; Turkey; Ireland; Peru; Chile; Morocco; Vietnam; Finland; Austria; Denmark; Hungary; Cuba
""")
VOCABULARY = _split("""
brave; curious; gentle; ancient; fragile; generous; honest; patient; quiet; rapid; bright; clever; enormous; grateful; humble;
loyal; modest; ordinary; polite; rare; simple; stubborn; tidy; useful; vivid; wise; ambitious; cautious; delicate; eager;
famous; graceful
""")
BUSINESSES = _split("""
a small bakery; a bicycle repair shop; a coffee shop; a pet store; a flower shop; a language school; a yoga studio; a bookshop;
a car wash; a vegetarian restaurant; a toy store; a cleaning service; a travel agency; a music school; a garden center; a photo
studio; an ice cream parlor; a tea house; a hair salon; a dance school; a furniture workshop; a swimming school; a food truck; a
board game cafe
""")
REVIEWS = _split("""
The food was cold and the waiter was rude.; I loved every minute of this book.; The hotel room was clean and the staff was
kind.; The phone broke after two days.; It was an average film, nothing special.; The delivery came early and everything was
perfect.; The shoes are comfortable but the color faded quickly.; This is the worst vacuum cleaner I have ever owned.; The
concert was amazing from start to end.; The manual is confusing and the screws were missing.; The cake was fresh and not too
sweet.; The app works, but it is slow.; Our guide was friendly and knew a lot about the city.; I waited an hour and nobody
answered the phone.; The chair looks nice and was easy to build.; The game is fun, but it has too many advertisements.; The
lesson was boring and too long.; Great value for the price, I would buy it again.; The soup had no taste at all.; My children
play with this toy every day.
""")
WRONG_SENTENCES = _split("""
She go to school every day.; They was late for the train.; I has two brother and one sister.; He don't like coffee.; We seen a
good movie yesterday.; The childs are playing in garden.; Me and him goes to the market.; She can sings very well.; There is
many books on the table.; I am live in a small town.; He writed a letter to his friend.; The dog have a long tail.; Yesterday I
go to the dentist.; These apple are sweet.; You was right about the weather.; She did not went to the party.; I have saw this
film before.; It are raining outside.; He is more taller than me.; We was waiting since two hours.; The informations are
useful.; She do her homework at night.
""")
JOBS = _split("""
a nurse; a teacher; a software engineer; a chef; a firefighter; an architect; a journalist; a pilot; a librarian; a carpenter;
an accountant; a veterinarian; a graphic designer; a police officer; a scientist; a farmer; an electrician; a translator; a
photographer; a bus driver; a dentist; a sales manager; a social worker; a mechanic; a musician; a project manager
""")
PLANS = _split("""
a busy student; a day at the beach; a rainy Sunday; a healthy week of dinners; a first visit to a museum; a weekend with
grandparents; a study day before an exam; a day of spring cleaning; a beginner's workout; a family game night; a day without
screens; a two day hiking trip; a productive Monday; a small birthday party; learning the guitar in a month; a morning routine;
an evening routine; a reading challenge; a school science day; a week of saving money; a garden project; a picnic for six people
""")
THANKS = _split("""
a wedding gift; help with moving house; a job interview; a kind letter; babysitting; a surprise party; a good lesson; a borrowed
book; a ride to the airport; a home cooked meal; years of friendship; a helpful phone call; fixing my computer; watering my
plants; a donation; a lovely weekend; good advice; a birthday present; a recommendation; a repaired bicycle
""")
